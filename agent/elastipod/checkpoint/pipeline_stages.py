"""Checkpoints of pipelines: the stages hold different tensors, and a checkpoint holds those of all stages.

Keys are the names that parameters have in the whole model, so each stage finds its own. What has no such name is kept apart by
the number of the stage: groups of an optimizer, and schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastipod.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE = "pp"
_NAMED = 3  # examples in a message


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """The stage of a pipeline that a rank holds. speaks: on one rank of each stage, which tells the others what the stage has."""

    number: int = 0
    count: int = 1
    speaks: bool = True

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> PipelineStage:
        """Read it from a mesh with a dimension `pp`; without one, every rank holds the whole model. Not a collective.

        Raises ValueError for a mesh without names.
        """
        if mesh is None:
            return cls()
        names = mesh.mesh_dim_names
        if not names:
            raise ValueError("mesh has dimensions without names; give one as elastipod.build_mesh makes it")
        if PIPELINE not in names:
            return cls()
        speaks = all(mesh.get_local_rank(name) == 0 for name in names if name != PIPELINE)
        return cls(mesh.get_local_rank(PIPELINE), mesh.size(names.index(PIPELINE)), speaks)

    def own_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return an optimizer's groups at numbers that no other stage uses: those of one stage are ``count`` apart."""
        if self.count == 1:
            return list(groups)
        spread: list[Mapping[str, Any]] = [{} for _ in range(len(groups) * self.count)]
        spread[self.number :: self.count] = groups
        return spread

    def own_names(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return named objects, such as schedules, under names that no other stage uses."""
        if self.count == 1:
            return dict(objects)
        return {f"{name}-stage{self.number}".removeprefix("-"): each for name, each in objects.items()}


WHOLE_MODEL = PipelineStage()


def refuse_shared_weights(of_stages: Mapping[int, Sequence[str]]) -> None:
    """Raise CheckpointError if stages have weights of the same names, because one would overwrite the other.

    of_stages: names, by number of the stage.
    """
    owners: dict[str, int] = {}
    for number, names in of_stages.items():
        if shared := [name for name in names if name in owners]:
            more = f" and {len(shared) - _NAMED} more" if len(shared) > _NAMED else ""
            raise CheckpointError(
                f"this state cannot be saved: the pipeline stages {owners[shared[0]]} and {number} both have "
                f"{', '.join(shared[:_NAMED])}{more}; let each stage keep the names that its layers have in the whole model (a "
                f'ModuleDict does), or pass model={{"stage{number}": ...}}'
            )
        owners |= dict.fromkeys(names, number)
