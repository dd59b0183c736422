"""What ``bench/tensor_parallel.py`` is made of: its case, and the contestants on a rank."""
