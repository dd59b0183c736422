"""The parts of ``bench/gpu.py``.

``parts`` lists what is measured and runs each part in processes of its own;
``collectives`` and ``bare`` compare NCCL through us with NCCL through CuPy alone; ``training`` has
the contestants of a training step take turns, of which ``member`` is the program of a rank and
``peer`` is PyTorch's, with the jobs of ``fsdp_bench``; ``report`` writes tables and says which
targets were reached; ``facts`` are those of the machine. ``probes`` asks with ``probe_one`` and
``probe_two`` what CuPy and NCCL do. ``limited`` runs all of these with a limit of time.
"""
