"""The parts of ``bench/fsdp_step.py``.

``cases`` says what is measured; ``exchange`` and ``training`` are our jobs on a rank and the
training step without communication, ``peer_exchange`` and ``peer_training`` those of PyTorch;
``member`` is the program of a rank; ``run`` has them take turns, ``report`` shows what came of it.
"""
