"""How the ranks of a job divide among tensor, pipeline, context and data parallelism. Importing it loads no torch.

Only the data-parallel axis stretches with the size of the job. The others are fixed, because the weights are cut along them.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastipod.errors import BatchSizeError

_NAMED = 6  # sizes that a message names


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The fixed axes of a job. shard: ranks among which HSDP cuts the weights of one replica; they train different samples.

    Raises BatchSizeError for a size below 1.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "shard"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BatchSizeError(f"{name} is {value!r}; it must be a whole number of at least 1")

    @property
    def model_group(self) -> int:
        """The ranks that hold the weights once between them: `spec.elastipod.parallelism` of the job."""
        return self.tensor * self.pipeline * self.context * self.shard

    def groups(self, world_size: int) -> int:
        """Give the number of model groups of a world. Raises BatchSizeError, with world sizes that work."""
        groups, rest = divmod(world_size, self.model_group)
        if rest or not groups:
            named = " x ".join(
                f"{name} {getattr(self, name)}"
                for name in ("tensor", "pipeline", "context", "shard")
                if getattr(self, name) > 1
            )
            first = max(1, round(world_size / self.model_group) - _NAMED // 2)
            fitting = ", ".join(str(self.model_group * number) for number in range(first, first + _NAMED))
            raise BatchSizeError(
                f"{world_size} ranks form no whole model groups of {self.model_group} ({named}); world sizes that fit: {fitting}. "
                f"spec.elastipod.parallelism: {self.model_group} keeps the job to such sizes"
            )
        return groups

    def data_parallel(self, world_size: int) -> int:
        """Give the number of ranks that train different samples. Raises BatchSizeError, with world sizes that work."""
        return self.groups(world_size) * self.shard

    def check_heads(self, heads: int, kv_heads: int | None = None) -> int:
        """Give how often each key/value head is replicated, so that every tensor-parallel rank has one.

        heads, kv_heads: attention heads and key/value heads of the model; kv_heads None: as many as heads. Raises
        BatchSizeError, with the tensor-parallel sizes that divide the heads.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise BatchSizeError(
                f"{heads} heads cannot share {kv_heads} key/value heads; the second must divide the first"
            )
        if not _divides(self.tensor, heads, kv_heads):
            fitting = [size for size in range(1, heads + 1) if _divides(size, heads, kv_heads)]
            raise BatchSizeError(
                f"tensor parallelism of {self.tensor} does not divide {heads} heads and {kv_heads} key/value heads (times a "
                f"replication); sizes that fit: {', '.join(map(str, fitting))}"
            )
        return max(1, self.tensor // kv_heads)


def _divides(tensor: int, heads: int, kv_heads: int) -> bool:
    return not heads % tensor and (not kv_heads % tensor or not tensor % kv_heads)
