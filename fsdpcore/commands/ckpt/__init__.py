"""The command ``fsdpcore ckpt``."""
