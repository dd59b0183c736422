"""Many small collectives in few messages."""
