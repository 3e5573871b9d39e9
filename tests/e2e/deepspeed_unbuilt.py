"""Imports DeepSpeed without its collectives in shared memory, which it would compile for a minute at the first start."""

import deepspeed.ops  # type: ignore[import-not-found]  # it is installed in an environment of its own

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
