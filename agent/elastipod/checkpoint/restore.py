"""Putting a saved state into the live objects: memory for it, whether it fits, and loading it."""

from __future__ import annotations

from typing import Any

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.file_source import FileSource
from elastipod.checkpoint.image_source import ImageSource
from elastipod.checkpoint.live_objects import LiveObjects, key_of
from elastipod.checkpoint.load_plan import LoadPlan, flat_keys, list_some
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.optimizer_state import (
    OPTIMIZER,
    describe_other_optimizer,
    load_optimizers,
    saved_groups,
    state_to_fill,
)
from elastipod.checkpoint.rng import restore_random_state, seed_new_rank
from elastipod.checkpoint.stateful_members import STATEFUL, load_stateful, stateful_to_fill, values_key
from elastipod.checkpoint.training_state import MODEL, RANDOM, SCHEDULER, load_models, nested_state, replica_local_keys
from elastipod.checkpoint.value_codec import decode_value
from elastipod.errors import CheckpointError
from elastipod.rank_in_world import RankInWorld

SavedSource = FileSource | ImageSource


class Restore:
    """One restore. strict: whether the saved state must have exactly what the live objects have.

    After `fit`: missing is what the checkpoint lacks, which stays as it is; unexpected is what only the checkpoint has. has_changed:
    whether live objects may have been changed; code that fills them sets it first.
    """

    def __init__(self, live: LiveObjects, *, strict: bool = True) -> None:
        self.live, self._strict = live, strict
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.has_changed = False
        self._elsewhere: frozenset[str] = frozenset()
        self._local_elsewhere: frozenset[str] = frozenset()

    @property
    def replica_local(self) -> frozenset[str]:
        """Keys of tensors that may differ between replicas; of all stages after `learn_other_stages`."""
        return self._local_elsewhere.union(replica_local_keys(self.live))

    def learn_other_stages(self, nested: dict[str, Any], source: SavedSource, comm: Communicator) -> None:
        """Learn which keys other stages of a pipeline have. nested: this rank's. Collective with stages, else nothing to do."""
        stage = self.live.stage
        if stage.count == 1:
            return

        def own() -> list[list[str]]:
            return (
                [sorted(flat_keys(nested, source)), sorted(replica_local_keys(self.live))] if stage.speaks else [[], []]
            )

        def joined(answers: list[list[list[str]]]) -> list[list[str]]:
            return [sorted(set().union(*each)) for each in zip(*answers, strict=True)]

        keys, local = comm.all_reduce(own, joined)
        self._elsewhere, self._local_elsewhere = frozenset(keys), frozenset(local)

    def nested(self, source: SavedSource) -> dict[str, Any]:
        """Return the live state to load into, with memory for what was saved. On all ranks: optimizers may run collectives."""
        nested = nested_state(self.live)
        if not self.live.is_weights_only:
            nested[OPTIMIZER] = state_to_fill(nested[OPTIMIZER], self.live, source.metadata, strict=self._strict)
        if stateful := stateful_to_fill(self.live.stateful, source.metadata):
            nested[STATEFUL] = stateful
        return nested

    def fit(self, name: str, source: SavedSource, nested: dict[str, Any]) -> LoadPlan:
        """Plan the load of a checkpoint. name: of the checkpoint, for messages. Raises CheckpointError when it does not fit."""
        try:
            filling = LoadPlan(nested, source, strict=self._strict, elsewhere=self._elsewhere)
            if (
                self._strict
                and not self.live.is_weights_only
                and (problem := describe_other_optimizer(self.live, source))
            ):
                raise ValueError(problem)
        except ValueError as error:
            what = "model" if self.live.is_weights_only else "model and optimizer"
            raise CheckpointError(f"{name} does not fit this {what}: {error}") from error
        lacking = self._lacking_values(source)
        if lacking and self._strict:
            raise CheckpointError(
                f"{name} was saved without a {list_some([*lacking.values()])}; resume without one, or from another checkpoint"
            )
        self.missing, self.unexpected = (*filling.missing, *lacking), filling.unexpected
        return filling

    def apply(self, of: CheckpointId, source: SavedSource, filling: LoadPlan, nested: dict[str, Any]) -> None:
        """Load the filled tensors and the plain values into the live objects."""
        filling.copy_values()
        lacking = self._lacking_values(source)
        schedules = {
            name: source.value(key) for name in self.live.schedulers if (key := key_of(SCHEDULER, name)) not in lacking
        }
        load_models(nested[MODEL], self.live)
        if self.live.is_weights_only:
            return
        load_optimizers(nested[OPTIMIZER], saved_groups(source, nested[OPTIMIZER]), self.live)
        for name, text in schedules.items():
            self.live.schedulers[name].load_state_dict(decode_value(text))
        for name, member in self.live.stateful.items():
            if values_key(name) not in lacking:
                load_stateful(member, source.value(values_key(name)), nested.get(STATEFUL, {}).get(name, {}))
        rank = RankInWorld.current().rank
        key = f"{RANDOM}.{rank}"
        if source.has_value(key):
            restore_random_state(source.value(key))
        else:
            seed_new_rank(of.step, rank)

    def describe_differences(self) -> str:
        """Return a sentence part on what was not loaded, empty if everything was."""
        parts = []
        if self.missing:
            parts.append(f"it has no {list_some(self.missing)}, which stays as it is")
        if self.unexpected:
            parts.append(f"its {list_some(self.unexpected)} is not loaded")
        return "; ".join(parts)

    def _lacking_values(self, source: SavedSource) -> dict[str, str]:
        """Return the values that were not saved, by key, as they are called in messages."""
        wanted = {key_of(SCHEDULER, name): f"scheduler {name}".rstrip() for name in self.live.schedulers}
        wanted |= {values_key(name): f"member {name}" for name in self.live.stateful}
        return {key: called for key, called in wanted.items() if not source.has_value(key)}
