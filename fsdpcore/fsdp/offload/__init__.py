"""Parameters and optimizer states outside of fast memory: host memory, files."""
