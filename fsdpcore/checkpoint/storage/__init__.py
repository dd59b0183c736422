"""Where checkpoints are kept, and how a folder becomes one."""
