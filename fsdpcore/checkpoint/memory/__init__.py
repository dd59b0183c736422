"""Arrays in memory: which parts of them a rank has, and copies between device and host."""
