"""What everything else stands on: errors, arrays, reductions, devices, handles of work.

Imports nothing of fsdpcore.
"""
