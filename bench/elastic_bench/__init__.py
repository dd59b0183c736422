"""The parts of ``bench/elastic.py``: losses and versions of a job whose ranks come and go."""
