"""The loaders whose samples an integration can take over: the plan then decides their order, which must be what the user asked for."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from elastipod.errors import FrameworkError


def check_loader(loader: DataLoader[Any]) -> None:
    """Raise FrameworkError, with what would work, for a loader that does not give every sample of a dataset once per epoch."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise FrameworkError(
            f"the loader reads a {type(dataset).__name__}, which gives no sample by its index, so its position would be "
            "lost at a resize; give a dataset with __getitem__ and __len__"
        )
    if loader.batch_size is None:
        raise FrameworkError("the loader has a batch_sampler; give it batch_size, the maximum for one pass, instead")
    if loader.drop_last:
        raise FrameworkError("the loader has drop_last=True, but every sample is trained; leave it out")
    if not _gives_all(loader.sampler, len(dataset)):
        raise FrameworkError(
            f"the loader has a {type(loader.sampler).__name__}, which chooses samples or repeats them, but the plan trains every "
            "sample of the dataset once per epoch; leave it out, and for a part of a dataset give torch's Subset"
        )


def _gives_all(sampler: object, size: int) -> bool:
    """Tell whether a sampler only decides the order of samples, or their division among ranks."""
    if type(sampler) is DistributedSampler:
        return len(sampler.dataset) == size and not sampler.drop_last  # type: ignore[arg-type]
    if type(sampler) is RandomSampler:
        return len(sampler.data_source) == sampler.num_samples == size and not sampler.replacement
    return type(sampler) is SequentialSampler and len(sampler) == size
