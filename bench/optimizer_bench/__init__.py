"""What ``bench/optimizer.py`` is made of."""
