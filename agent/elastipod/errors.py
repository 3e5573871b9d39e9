"""Errors of the training library: one base, and one subclass per thing that a caller can do about it."""

from __future__ import annotations


class ElastipodError(Exception):
    """Base of every error that the library raises by design. Its text is one sentence for the user."""


class ElasticAgreementError(ElastipodError):
    """The ranks cannot agree on a stop step; the text says why."""


class ElasticAgreementTimeout(ElasticAgreementError):
    """Some ranks did not take part in time, because they died, hang, or call `elastic_event_detected` unequally often."""


class CheckpointError(ElastipodError):
    """A checkpoint cannot be written or read. The run should end; the text says which file and what to do."""


class FencedError(CheckpointError):
    """A newer generation owns the checkpoint directory. This process must stop and must delete nothing."""


class SampleLogError(ElastipodError):
    """A sample log cannot be written, or an existing one would be overwritten."""


class UnusableLogsError(ElastipodError):
    """The sample logs do not allow a verdict: files are missing, contradict one another, or cannot be parsed."""


class DataError(ElastipodError):
    """Data cannot be used as asked: another dataset than the checkpoint's, a damaged or foreign file, a shard that ends early."""


class BatchSizeError(ElastipodError, ValueError):
    """A batch cannot be cut as asked; the text names the sizes that would work."""


class RecipeError(ElastipodError, ValueError):
    """An elastic recipe contradicts itself or has a field that cannot be read; the text begins with the field."""
