"""``python -m elastipod_agent`` is ``hyperpodrun``."""

import sys

from elastipod_agent.main import main

if __name__ == "__main__":
    sys.exit(main())
