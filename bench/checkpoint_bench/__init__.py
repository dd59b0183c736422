"""The parts of ``bench/checkpoint.py``.

``cases`` says what is measured, ``model`` what is stored, and ``folders`` where; ``ours`` and
``peer`` are the contestants' jobs (``peer`` alone imports PyTorch), ``member`` is the program of a
rank; ``run`` has them take turns, ``report`` shows what came of it.
"""
