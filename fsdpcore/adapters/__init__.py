"""How frameworks and models plug into the engine.

==============  ====================================================================================
``layers``      ``LayerStack``, ``Chain``: objects with ``forward`` and ``backward``
``function``    ``train_step``: a function that returns a loss and all gradients
``fully_shard``  objects that keep their parameters in attributes
``autograd``    functions that HIPS autograd differentiates
``jax``         functions that JAX differentiates, on the host
``arrays``      any of these, with arrays of another library
==============  ====================================================================================

The first three are in ``fsdpcore`` itself; the others are modules to be imported from here.
"""
