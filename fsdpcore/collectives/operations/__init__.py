"""The collective operations, one file each: what is a collective's own, and its public function.

All ranks of a group call the same operation with arrays that fit, in the same order. To add one:
its file, its lines in ``table``, and the algorithms that carry it out in ``selection/table.py``.
"""
