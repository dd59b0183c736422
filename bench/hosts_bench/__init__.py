"""The parts of ``bench/hosts.py``: collectives and training between hosts, over links of a rate."""
