"""Warm workers: a server process that has torch imported already, and forks workers when the agent orders some.

`client` is the agent's side. Everything else runs in the server, or in the workers forked from it; it may run under another
interpreter than the agent ($PYTHON_EXEC), so it uses the standard library and this package only. See docs/design/warm-workers.md.
"""
