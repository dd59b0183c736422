"""Virtual time: fibers on a clock that jumps, and the model of the network that they send over."""
