"""The transports, one folder each; found by scheme through ``fsdpcore.comm.registry``.

Installed as ``fsdpcore.transports``. Nothing outside this folder knows a transport by name.
"""
