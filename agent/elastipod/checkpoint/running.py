"""What a manager has once the directory is claimed: the generation, connections, memory, and what saves and loads with them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.live_objects import LiveObjects
from elastipod.checkpoint.memory_directory import open_memory_directory
from elastipod.checkpoint.restore import Restore
from elastipod.checkpoint.resume import Resume
from elastipod.checkpoint.resumed_state import ResumedState
from elastipod.checkpoint.resumer import Resumer
from elastipod.checkpoint.save_arguments import check_steps, require_step
from elastipod.checkpoint.saver import Save, Saver
from elastipod.checkpoint.staging import Staging
from elastipod.checkpoint.store import CheckpointStore
from elastipod.local_worker import generation_from_env, job_from_env, run_id_from_env


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """The arguments of a manager that a claim needs. memory: folder of a memory file system, None for none."""

    keep: int
    keep_every: int | None
    generation: int | None
    memory: Path | None
    adopt: bool


@dataclass(slots=True)
class Running:
    """The parts of a manager in one generation. Methods are collective.

    comm: another one after a save was given up, whose thread may hang for as long as the process lives.
    """

    store: CheckpointStore
    generation: int
    comm: Communicator
    staging: Staging
    saver: Saver

    @classmethod
    def claim(cls, store: CheckpointStore, options: ManagerOptions, *, on_default_group: bool) -> Running:
        """Claim the directory. Raises FencedError and CheckpointError as `CheckpointManager.claim` does.

        on_default_group: as for `Communicator`.
        """
        wanted = options.generation or generation_from_env()

        def claimed() -> tuple[int, str]:
            number = store.claim(wanted, run_id_from_env(), job=job_from_env(), adopt=options.adopt)
            return number, store.identity()

        # A load or the first save connects: one that needs no more than its node's memory spares it.
        comm = Communicator(on_default_group=on_default_group)
        generation, identity = comm.training_broadcast(claimed)
        staging = Staging(open_memory_directory(options.memory, identity), comm)
        saver = Saver(store, staging, keep=options.keep, keep_every=options.keep_every)
        return cls(store, generation, comm, staging, saver)

    @property
    def has_memory(self) -> bool:
        return self.staging.directory is not None

    def memory_path(self) -> Path:
        """Return the folder of memory checkpoints."""
        assert self.staging.directory is not None
        return self.staging.directory.path

    def agree_on_step(self, step: int) -> None:
        """Check that all ranks save the same step, before what is done with it, which differs by step, and find out who has memory.

        Raises CheckpointError on all ranks where they do not.
        """

        def agreed(answers: list[tuple[int, bool]]) -> bool:
            steps, have_memory = zip(*answers, strict=True)
            check_steps(steps)
            return all(have_memory)

        self.staging.all_have_memory(self.comm.training_all_reduce(lambda: (step, self.has_memory), agreed))

    def succeeded(self, save: Save) -> bool:
        """Wait for a save and return whether it succeeded on every rank: ranks may have lost contact at its very end."""
        self.await_save(save)
        return self.comm.training_all_reduce(lambda: save.failure is None, all)

    def await_save(self, save: Save) -> None:
        """Wait for a save, as `Save.await_end` does. Where it was given up, go on with connections that its thread does not know.

        Not collective: the next operation of all ranks finds that some have no connections, and makes new ones.
        """
        save.await_end()
        if save.comm is self.comm and save.comm.is_retired:
            self.comm = save.comm.replacement()
            self.staging.go_on_with(self.comm, save.thread)
            self.saver.note_given_up(save)

    def load(
        self,
        live: LiveObjects,
        unmap_threads: list[threading.Thread],
        step: int | None,
        *,
        strict: bool,
        on_holders: bool,
        writes: bool,
    ) -> tuple[Resume | None, ResumedState | None]:
        """Load as `CheckpointManager.load` does; None for the newest. Also return what of it must be written to durable storage.

        unmap_threads: receives the threads that unmap memory; training need not wait for them. on_holders: as
        `CheckpointManager.load_on_holders`. writes: whether the caller writes it; it closes it, too.
        """
        restore = Restore(live, strict=strict)
        resumer = Resumer(
            self.store,
            self.staging,
            self.comm,
            self.generation,
            restore,
            step=step,
            on_holders=on_holders,
            writes=writes,
        )
        try:
            resume = resumer.resume()
            if resume is not None:
                self.saver.note_loaded(resume.step, resumer.durable)
            if resume is not None and step is not None:
                self.staging.withdraw_later(resume.step)
            return resume, resumer.unwritten
        finally:
            self.saver.damaged = resumer.damaged
            unmap_threads += resumer.unmap_threads


def load_weights(
    store: CheckpointStore, comm: Communicator | None, live: LiveObjects, step: int | None, *, strict: bool
) -> Resume | None:
    """Load weights from durable storage without a claim, as `CheckpointManager.load_weights` does. Collective.

    comm: connections that exist; None: made for this call.
    """
    if step is not None:
        require_step(step)
    connected = comm or Communicator()
    try:
        restore = Restore(live, strict=strict)
        return Resumer(store, Staging(None, connected), connected, 0, restore, step=step).resume()
    finally:
        if comm is None:
            connected.end()
