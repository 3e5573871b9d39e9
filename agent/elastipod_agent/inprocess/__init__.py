"""Workers that live over generations: gathered at a barrier, released into a run, called back from it."""
