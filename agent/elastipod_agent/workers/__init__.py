"""Processes: the workers, what they print, and everything that descends from them."""
