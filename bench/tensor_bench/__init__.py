"""What bench/tensor_parallel.py runs."""
