"""Collectives of float32 arrays that travel as integers of 8 or 4 bits, with scales by blocks."""
