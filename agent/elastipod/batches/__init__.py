"""How a global batch is trained: sizes per rank and pass, learning rates, recipes."""
