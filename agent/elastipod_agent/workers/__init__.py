"""Processes: the workers, their output, and all their descendants."""
