"""One generation in this pod: start the workers, supervise them, report a fault, drain or stop them, and name the end.

`supervisor` is the flow; `process_workers` and `inprocess.pooled_workers` are the two ways in which workers come and go.
"""
