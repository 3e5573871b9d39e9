"""`elastipod suspend JOB`."""

from .changes import suspend as main
from .changes import suspend_parser as parser

__all__ = ["main", "parser"]
