"""The parts of ``bench/fsdp_step.py``.

``cases`` says what is measured, ``member`` is the program of a rank, ``exchange`` and ``training``
are ours, ``alone`` is the training step without communication, ``peer_exchange`` and
``peer_training`` are PyTorch's (the only modules that import it), ``run`` asks all of them in turn,
``report`` shows what came of it. Teams of ranks, turns and samples are those of ``fsdpcore.bench``.
"""
