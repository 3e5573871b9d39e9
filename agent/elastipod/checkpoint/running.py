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
from elastipod.checkpoint.resumer import Resumer
from elastipod.checkpoint.save_arguments import require_step
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


@dataclass(frozen=True, slots=True)
class Running:
    """The parts of a manager in one generation. Methods are collective."""

    store: CheckpointStore
    generation: int
    comm: Communicator
    staging: Staging
    saver: Saver

    @classmethod
    def claim(cls, store: CheckpointStore, options: ManagerOptions) -> Running:
        """Claim the directory. Raises FencedError and CheckpointError as `CheckpointManager.claim` does."""
        wanted = options.generation or generation_from_env()

        def claimed() -> tuple[int, str]:
            number = store.claim(wanted, run_id_from_env(), job=job_from_env(), adopt=options.adopt)
            return number, store.identity()

        comm = Communicator()
        generation, identity = comm.training_broadcast(claimed)
        images = open_memory_directory(options.memory, identity)
        has_memory = comm.training_all_reduce(lambda: images is not None, all)
        staging = Staging(images if has_memory else None, comm)
        saver = Saver(store, staging, comm, keep=options.keep, keep_every=options.keep_every)
        return cls(store, generation, comm, staging, saver)

    @property
    def has_memory(self) -> bool:
        return self.staging.directory is not None

    def memory_path(self) -> Path:
        """Return the folder of memory checkpoints."""
        assert self.staging.directory is not None
        return self.staging.directory.path

    def succeeded(self, save: Save) -> bool:
        """Wait for a save and return whether it succeeded on every rank: ranks may have lost contact at its very end."""
        save.thread.join()
        return self.comm.training_all_reduce(lambda: save.error is None, all)

    def load(
        self, live: LiveObjects, unmap_threads: list[threading.Thread], step: int | None, *, strict: bool
    ) -> tuple[Resume | None, bool]:
        """Load as `CheckpointManager.load` does; None for the newest. Also return whether it must be written to durable storage.

        unmap_threads: receives the threads that unmap memory; training need not wait for them.
        """
        resumer = Resumer(self.store, self.staging, self.comm, self.generation, Restore(live, strict=strict), step=step)
        try:
            resume = resumer.resume()
            if resume is not None:
                self.saver.note_loaded(resume.step, resumer.durable)
            return resume, resumer.needs_durable_write
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
            connected.close()
