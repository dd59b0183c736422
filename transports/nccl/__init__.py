"""``nccl``: a ``zmq`` job whose ranks have a GPU each."""
