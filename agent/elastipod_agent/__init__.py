"""hyperpodrun: the launcher in each pod that starts, watches and stops the workers as the operator says.

`main` reads the command line, `agent` carries one pod's life, `core` holds the decisions (pure), `server` the control
API, `workers` the processes. Nothing here imports torch: the agent stays small beside the workers it looks after.
"""

__version__ = "0.1.0"
