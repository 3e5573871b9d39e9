"""Decisions of the agent: facts in, what to do out. No clock, no file, no process, no socket."""
