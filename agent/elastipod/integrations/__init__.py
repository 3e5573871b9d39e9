"""Elastic training inside frameworks: one module for each, imported by the scripts that use it and by nothing else.

``elastipod.integrations.transformers``, ``.accelerate`` and ``.lightning``. Each says in one sentence when its package is
missing or too old (`packages.TESTED` has the versions). The framework keeps its loop, its wrappers and its checkpoints; this
package adds the plan of the samples, the elastic event, the mark of a complete checkpoint and the sample log.
"""
