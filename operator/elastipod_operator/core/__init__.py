"""Decisions of the operator: pure functions of what was observed and of the time. Nothing here does I/O or reads a clock."""
