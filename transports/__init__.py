"""The transports, one module each; found by scheme through ``fsdpcore.registry``.

Installed as ``fsdpcore.transports``. Nothing outside this folder knows a transport by name.
"""
