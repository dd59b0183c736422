"""``zmq``: the ranks are processes, connected by ZeroMQ and TCP."""
