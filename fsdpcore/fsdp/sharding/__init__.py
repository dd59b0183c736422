"""What is sharded over which ranks."""
