"""`elastipod scale JOB --replicas N`."""

from .changes import scale as main
from .changes import scale_parser as parser

__all__ = ["main", "parser"]
