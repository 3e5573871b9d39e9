"""`python -m elastipod_local ...` is the same as `elastipod local ...`."""

import sys

from elastipod_local.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
