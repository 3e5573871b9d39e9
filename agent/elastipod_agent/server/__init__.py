"""The control API over HTTP, on the standard library."""
