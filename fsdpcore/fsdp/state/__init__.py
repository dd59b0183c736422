"""What is kept of an engine: state dicts, whole parameters."""
