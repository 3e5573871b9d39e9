"""`elastipod resume JOB`."""

from .changes import resume as main
from .changes import resume_parser as parser

__all__ = ["main", "parser"]
