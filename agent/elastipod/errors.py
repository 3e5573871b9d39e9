"""Errors of the training library: one base class, and a subclass for each thing that a caller can do about it."""

from __future__ import annotations


class ElastipodError(Exception):
    """Base of every error that the library raises on purpose. Its text is one sentence for the user."""


class ElasticAgreementError(ElastipodError):
    """The ranks cannot agree on a step to stop at; the text says why."""


class ElasticAgreementTimeout(ElasticAgreementError):
    """Some ranks did not take part in time: they died, hang, or call `elastic_event_detected` less often than others."""


class CheckpointError(ElastipodError):
    """A checkpoint cannot be written or read. The run should end; the text names the file and what to do."""


class FencedError(CheckpointError):
    """A newer generation owns the checkpoint directory. This process must stop and must not delete anything."""


class StateDiffersError(ElastipodError):
    """This rank's state is not that of its replicas, or not that of its plan. Its process ends, and another takes its place."""


class SampleLogError(ElastipodError):
    """A sample log cannot be written, or would overwrite an existing one."""


class UnusableLogsError(ElastipodError):
    """The sample logs do not allow a verdict: files are missing, contradict each other, or cannot be parsed."""


class DataError(ElastipodError):
    """Data cannot be used: it differs from the checkpoint's, a file is damaged or foreign, or a shard ends early."""


class FrameworkError(ElastipodError):
    """A framework is missing, too old, or set up so that a resize would not be exact; the text says what to change."""


class BatchSizeError(ElastipodError, ValueError):
    """A batch cannot be divided as requested; the text names sizes that work."""


class RecipeError(ElastipodError, ValueError):
    """An elastic recipe contradicts itself or has an invalid field; the text begins with the path of the field."""
