"""How frameworks and models plug into the engine."""
