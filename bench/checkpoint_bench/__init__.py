"""The parts of ``bench/checkpoint.py``.

``cases`` says what is measured, ``model`` what is stored, ``member`` is the program of a rank,
``ours``, ``limit`` and ``peer`` are the contestants (``peer`` alone imports PyTorch), ``run`` asks
all of them in turn, ``report`` shows what came of it. Teams of ranks are those of
``fsdpcore.bench``.
"""
