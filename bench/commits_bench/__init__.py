"""The parts of ``bench/compare_commits.py``.

``cases`` lists what is measured, ``member`` is the program of a rank: it runs under both checkouts,
so it knows the public interface of fsdpcore only. ``report`` shows how the two differ.
"""
