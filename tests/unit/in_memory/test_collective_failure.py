"""Which errors mean that a peer is gone, and which are mistakes of the script."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from elastipod.in_memory.collective_failure import is_collective_failure
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.world_life import WorldLife
from elastipod.torch_compat import device_errors


class Agent:
    """Answers whether the generation is over, and counts how often it was asked."""

    def __init__(self, *, is_over: bool) -> None:
        self.is_over = is_over
        self.num_asked = 0

    def __call__(self, timeout_s: float) -> bool:
        assert timeout_s > 0
        self.num_asked += 1
        return self.is_over


def raised_by_distributed(text: str, kind: type[RuntimeError] = RuntimeError) -> BaseException:
    """Give an error with the traceback of one that torch.distributed raised."""
    code = compile("raise kind(text)", "/x/torch/distributed/distributed_c10d.py", "exec")
    with pytest.raises(kind) as caught:
        exec(code, {"kind": kind, "text": text})
    return caught.value


def raised_by_script(error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"


def test_a_text_of_gloo_from_a_collective_needs_no_agent() -> None:
    agent = Agent(is_over=False)
    assert is_collective_failure(raised_by_distributed(GLOO), agent)
    assert agent.num_asked == 0


@pytest.mark.parametrize("is_over", [True, False])
def test_an_unknown_text_from_a_collective_is_what_the_agent_says(is_over: bool) -> None:
    agent = Agent(is_over=is_over)
    assert is_collective_failure(raised_by_distributed("something broke"), agent) is is_over
    assert agent.num_asked == 1


@pytest.mark.parametrize(
    "error",
    [
        raised_by_distributed("ProcessGroupGloo::allgather: invalid tensor size at index 1 (expected (2), got (3))"),
        raised_by_distributed(
            "ProcessGroupGloo::scatter: requires a single-element input list containing a list with 2 tensors"
        ),
        dist.DistBackendError(
            "NCCL error in: x.cpp:1, invalid usage, NCCL version 2.27.3\nncclInvalidUsage: This usually reflects"
        ),
        dist.DistBackendError(
            "NCCL error in: x.cpp:1, invalid argument, NCCL version 2.27.3\nncclInvalidArgument: Invalid value"
        ),
    ],
    ids=["gather", "scatter", "usage", "argument"],
)
@pytest.mark.parametrize("is_over", [True, False])
def test_arguments_that_a_backend_refuses_are_no_lost_peer_unless_the_agent_says_so(
    error: RuntimeError, is_over: bool
) -> None:
    """Or else the ranks would regroup for ever, and the script's mistake be shown nowhere."""
    agent = Agent(is_over=is_over)
    assert is_collective_failure(error, agent) is is_over
    assert agent.num_asked == 1


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), id="a mistake in a model"),
        pytest.param(RuntimeError(GLOO), id="a text that only looks like gloo's"),
        pytest.param(ValueError("bad"), id="another type"),
        pytest.param(torch.OutOfMemoryError("no memory"), id="out of memory"),
        pytest.param(NotImplementedError("later"), id="a subclass of RuntimeError"),
        pytest.param(KeyboardInterrupt(), id="no Exception at all"),
    ],
)
def test_what_the_script_raises_is_its_own_even_when_a_peer_is_lost(error: BaseException) -> None:
    agent = Agent(is_over=True)
    assert not is_collective_failure(raised_by_script(error), agent)
    assert agent.num_asked == 0, "nobody waits for the agent before the traceback is shown"


def test_an_error_of_the_device_ends_the_process_wherever_it_comes_up() -> None:
    """Its context is lost: such a process would come back with a state that it can neither read nor give away."""
    agent = Agent(is_over=True)
    error = raised_by_distributed("CUDA error: an illegal memory access was encountered", device_errors()[-1])
    assert not is_collective_failure(error, agent)
    assert agent.num_asked == 0


def test_an_error_type_of_torch_distributed_is_a_collective_s() -> None:
    assert is_collective_failure(raised_by_script(dist.DistNetworkError("reset")), Agent(is_over=False))


@pytest.mark.parametrize("is_over", [True, False])
def test_an_error_of_autograd_s_engine_may_come_from_ddp_so_the_agent_decides(is_over: bool) -> None:
    loss = torch.ones(2, requires_grad=True).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="second time") as caught:
        loss.backward()  # type: ignore[no-untyped-call]
    assert is_collective_failure(caught.value, Agent(is_over=is_over)) is is_over


@pytest.mark.parametrize(("is_kept", "is_over"), [(True, True), (True, False), (False, True)])
def test_a_rank_whose_process_is_kept_is_lost_to_what_the_agent_says_ended_the_generation(
    is_kept: bool, is_over: bool
) -> None:
    life = object.__new__(WorldLife)
    error, agent = raised_by_distributed("something broke"), Agent(is_over=is_over)
    life.link = None
    assert not life.is_lost_to(error)
    life.link = SimpleNamespace(is_kept=is_kept, wait_until_over=agent)  # type: ignore[assignment]
    assert life.is_lost_to(error) is (is_kept and is_over)
    assert agent.num_asked == is_kept
    assert life.is_lost_to(WorldLost("the plans could not be compared")) is is_kept
