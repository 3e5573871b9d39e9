"""Train a small policy by group-relative policy optimization (GRPO): a rollout phase, an update phase, and only then a resize.

Rollout workers (`--role=rollout`) help with the rollouts while they are there. They may come, go and be killed at any time: a
rollout follows from the policy, the prompt and the step alone, so it does not matter who makes it, and trainers make what nobody
else does. Start it with `hyperpodrun train.py ...` (elastic) or `torchrun train.py ...`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod import (
    Batch,
    CheckpointManager,
    ElasticBatches,
    SampleLog,
    accumulate,
    elastic_event_detected,
    report,
)

WORDS, PROMPT, ANSWER, GROUP = 12, 3, 6, 8  # words known, of a prompt, of an answer; answers to one prompt
UPDATES, CLIP, ENTROPY = 2, 0.2, 0.2  # optimizer steps of one update phase; bound of the ratio; weight of the entropy
LOST_AFTER_S = 2.0  # a rollout that somebody else began and did not finish
TRAINERS_START_S = 60.0  # in which trainers that start beside a helper take away what an earlier run left

Rollout = dict[str, torch.Tensor]


class Policy(nn.Module):
    """Gives the logarithm of each next word's probability, shape (rows, length, WORDS), in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.head = (
            nn.Embedding(WORDS, 16),
            nn.GRU(16, 16, batch_first=True),
            nn.Linear(16, WORDS),
        )
        self.double()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.embed(words))[0]).log_softmax(-1)


def make_rollout(policy: Policy, index: int, step: int) -> Rollout:
    """Answer one prompt GROUP times. An answer is good when it repeats the first word of the prompt."""
    prompt = torch.randint(WORDS, (PROMPT,), generator=torch.Generator().manual_seed(index))
    random = torch.Generator().manual_seed(1_000_003 * step + index)
    words = prompt.repeat(GROUP, 1)
    with torch.no_grad():
        for _ in range(ANSWER):
            chances = policy(words)[:, -1].exp()
            words = torch.cat([words, torch.multinomial(chances, 1, generator=random)], dim=1)
        old = chosen(policy(words), words)
    rewards = (words[:, PROMPT:] == prompt[0]).double().mean(dim=1)
    return {"words": words, "old": old, "advantages": (rewards - rewards.mean()) / (rewards.std() + 1e-3)}


def chosen(logarithms: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Give the logarithms of the probabilities of an answer's words, shape (rows, ANSWER)."""
    return logarithms[:, PROMPT - 1 : -1].gather(-1, words[:, PROMPT:, None]).squeeze(-1)


def loss_of(model: nn.Module, rollouts: list[Rollout]) -> torch.Tensor:
    """Give the mean loss over the answers to some prompts."""
    words, old, advantages = (torch.cat([each[name] for each in rollouts]) for name in ("words", "old", "advantages"))
    new = chosen(model(words), words)
    ratio, advantages = (new - old).exp(), advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain - ENTROPY * new).mean()


class Exchange:
    """A shared folder in which trainers offer the policy of a step, and anybody leaves rollouts made with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def clear(self) -> None:
        """Remove what an earlier start left: offers of a policy that nobody trains any more, and that it was done."""
        (self.folder / "done").unlink(missing_ok=True)
        for path in self.folder.glob("[0-9]*-[0-9]*"):
            self.withdraw(path.name)

    def offer(self, name: str, step: int, indices: list[int], policy: Policy) -> None:
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        write(self.folder / name / "policy", {"step": step, "indices": indices, "policy": policy.state_dict()})

    def withdraw(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def offers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in self.folder.glob("*/policy"):
            with suppress(FileNotFoundError):
                yield path.parent.name, torch.load(path)

    def begin(self, name: str, index: int) -> bool:
        """Give True to the first one who asks: it makes this rollout."""
        with suppress(FileExistsError, FileNotFoundError):
            os.close(os.open(self.folder / name / f"{index}.begun", os.O_CREAT | os.O_EXCL))
            return True
        return False

    def finish(self, name: str, index: int, rollout: Rollout) -> bool:
        with suppress(FileNotFoundError):  # the trainers are further by now
            write(self.folder / name / str(index), rollout)
            return True
        return False

    def collect(self, name: str, step: int, batch: Batch, policy: Policy) -> tuple[list[Rollout], int]:
        """Give the rollouts of a rank's prompts, and how many of them others made."""
        found: dict[int, Rollout] = {}
        others = [index for index in batch.indices if not self.begin(name, index)]
        for index in batch.indices_or_spare:
            if index not in others:
                found[index] = make_rollout(policy, index, step)
        helped = 0
        for index in others:
            path, until = self.folder / name / str(index), time.monotonic() + LOST_AFTER_S
            while not path.exists() and time.monotonic() < until:
                time.sleep(0.005)
            helped += path.exists()
            found[index] = torch.load(path) if path.exists() else make_rollout(policy, index, step)
        return [found[index] for index in batch.indices_or_spare], helped


def write(path: Path, content: object) -> None:
    """Write a file that is either complete or not there."""
    draft = path.with_name(f"{path.name}-{os.uname().nodename}-{os.getpid()}")
    torch.save(content, draft)
    draft.rename(path)


def help_with_rollouts(options: argparse.Namespace) -> None:
    """Make rollouts until the trainers are done. It has no state: it may end at any point."""
    exchange, policy, made = Exchange(options.exchange_dir), Policy(), 0
    done = options.exchange_dir / "done"
    may_be_old, until = done.exists(), time.monotonic() + TRAINERS_START_S
    while not (is_done := done.exists()) or may_be_old:
        may_be_old = is_done and may_be_old and time.monotonic() < until
        for name, offer in exchange.offers():
            policy.load_state_dict(offer["policy"])
            for index in offer["indices"]:
                if exchange.begin(name, index):
                    made += exchange.finish(name, index, make_rollout(policy, index, offer["step"]))
                    print(f"made {made} rollouts", flush=True)
        time.sleep(0.01)


def train(options: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    exchange = Exchange(options.exchange_dir)
    plan = ElasticBatches(options.prompts, 16, epochs=options.epochs)
    torch.manual_seed(0)  # the same weights on every rank
    policy = Policy()
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    checkpoints = CheckpointManager(options.checkpoint_dir)
    resume = checkpoints.load_latest(model=model, optimizer=optimizer)
    if resume:
        plan = plan.resumed(resume.extra["data"])
    log = SampleLog(
        options.sample_log_dir, plan, generation=checkpoints.generation, rank=rank, world_size=world_size, resume=resume
    )
    if rank == 0:
        exchange.clear()
    dist.barrier()
    for batch in plan.iterate(rank, world_size):
        name = f"{checkpoints.generation}-{batch.step}"
        if rank == 0:  # rollout phase
            exchange.offer(name, batch.step, list(plan.batch(batch.step, 0, 1).indices), policy)
        dist.barrier()
        time.sleep(options.rollout_time)
        rollouts, helped = exchange.collect(name, batch.step, batch, policy)

        for _ in range(UPDATES):  # update phase: the last step says how good the policy was
            optimizer.zero_grad()
            total = torch.zeros(2, dtype=torch.float64)
            for part in accumulate(model, batch, size=4):
                loss = loss_of(model, rollouts[part.rows]) * part.weight
                loss.backward()
                total[0] += loss.detach()
            optimizer.step()
        total[1] = helped
        dist.all_reduce(total)
        if rank == 0:
            exchange.withdraw(name)
            print(f"step {batch.step}: {int(total[1])} of {batch.global_size} rollouts by helpers", flush=True)
        mean = total[0].item() / world_size
        log.step(batch, mean)
        report(batch.step, batch.samples_seen, mean)

        is_last = batch.step == plan.total_steps
        leaving = not is_last and elastic_event_detected()  # between phases, where no rollout is under way
        if leaving or is_last or batch.step % options.checkpoint_every == 0:
            extra = {"data": plan.state_dict(batch.step)}
            checkpoints.save(batch.step, model=model, optimizer=optimizer, extra=extra, sample_log=log)
        if leaving or is_last:
            log.end(batch.step, "drained" if leaving else "completed")
        if leaving:
            return
    if rank == 0:
        options.exchange_dir.joinpath("done").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--role", choices=("trainer", "rollout"), default="trainer")
    parser.add_argument("--exchange-dir", type=Path, required=True, help="policies and rollouts; shared by all workers")
    parser.add_argument("--checkpoint-dir", help="shared by all trainers")
    parser.add_argument("--sample-log-dir", help="shared by all trainers; `elastipod audit` reads it")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--rollout-time", type=float, default=0.0, help="seconds in which helpers alone make rollouts")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if options.role == "rollout":
        return help_with_rollouts(options)
    if not options.checkpoint_dir or not options.sample_log_dir:
        parser.error("trainers need --checkpoint-dir and --sample-log-dir")
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
