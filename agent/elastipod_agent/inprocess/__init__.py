"""Workers that live over generations: gathered at a barrier, released into a run, and brought back from it."""
