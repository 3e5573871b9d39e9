"""Commands for users of jobs: `elastipod why`, `doctor`, `timeline` and others, also as `kubectl elastipod`.

They need kubectl and the standard library. Of the operator they import only the pure parts that need nothing else either.
"""
