"""Resize and recover in memory: the protocol of the ranks (docs/design/in-memory.md). No I/O and no torch in here."""
