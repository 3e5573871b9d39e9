"""hyperpodrun: the launcher in each pod. It starts, monitors and stops the workers under the control of the operator.

`main` reads the command line, `agent` is the life of one pod, `generation` one run of the workers, `core` the decisions (pure), `server`
the control API, `workers` the processes. Nothing here imports torch, so the agent stays small beside its workers.
"""

__version__ = "0.1.0"
