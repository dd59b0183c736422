"""Fully sharded data parallel training (ZeRO) over any backend, for any framework's loop."""
