"""The environment of workers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.worker_env import VOLATILE, Layout, pod_env, steady_env, worker_env

START = StartRequest(rank=1, nnodes=3, fault_count=6, master_addr="10.0.0.9", master_port=10070, generation=7)
LAYOUT = Layout(nproc=2, run_id="ns/job", role="default", max_restarts=3)


def env_of(local_rank: int, start: StartRequest = START, layout: Layout = LAYOUT, **base: str) -> dict[str, str]:
    return worker_env(base, start, layout, local_rank, worker_file="/w", error_file="/e")


def test_a_worker_gets_the_whole_set() -> None:
    assert env_of(1, PATH="/bin", NNODES="1") == {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "6",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "10070",
        "NNODES": "3",
        "NPROC_PER_NODE": "2",
        "JOB_RESTART_COUNT": "6",
        "TORCHELASTIC_RESTART_COUNT": "6",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "ns/job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/e",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "ELASTIPOD_GENERATION": "7",
        "ELASTIPOD_WORKER_FILE": "/w",
    }


def test_what_the_user_set_stays() -> None:
    env = env_of(
        0,
        OMP_NUM_THREADS="8",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="3",
        HYPERPOD_SIGNAL_COORDINATION="disabled",
        GLIBC_TUNABLES="",
    )
    assert env["OMP_NUM_THREADS"] == "8"
    assert env["GLIBC_TUNABLES"] == ""
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert env["HYPERPOD_SIGNAL_COORDINATION"] == "disabled"


KEPT = Layout(nproc=1, run_id="r", role="default", max_restarts=0, keeps_processes=True)


def test_an_error_of_nccl_ends_no_process_that_is_kept_after_faults() -> None:
    env = env_of(0, layout=KEPT)
    assert (env["TORCH_NCCL_ASYNC_ERROR_HANDLING"], env["TORCH_NCCL_RETHROW_CUDA_ERRORS"]) == ("0", "0")
    assert steady_env({}, KEPT).items() <= env.items()


def test_the_watchdog_of_a_process_that_is_kept_does_not_wait_for_flight_recorders() -> None:
    """A minute after an error, in which its process group cannot end; a kept process has five seconds for that."""
    names = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    assert [env_of(0, layout=KEPT)[name] for name in names] == ["0", "0"]
    assert env_of(0, layout=KEPT, TORCH_NCCL_DUMP_ON_TIMEOUT="1")[names[0]] == "1", "as the user has it"
    assert not {*names} & env_of(0, layout=LAYOUT).keys()


@pytest.mark.parametrize("layout", [LAYOUT, KEPT], ids=["replaced", "kept"])
def test_the_users_error_handling_stays_also_under_its_former_name(layout: Layout) -> None:
    env = env_of(0, layout=layout, NCCL_ASYNC_ERROR_HANDLING="2", TORCH_NCCL_RETHROW_CUDA_ERRORS="1")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in env, "it would override the former name"
    assert (env["NCCL_ASYNC_ERROR_HANDLING"], env["TORCH_NCCL_RETHROW_CUDA_ERRORS"]) == ("2", "1")


def test_a_single_worker_keeps_its_threads() -> None:
    assert "OMP_NUM_THREADS" not in env_of(0, layout=Layout(nproc=1, run_id="r", role="default", max_restarts=0))


def test_progress_is_handed_on() -> None:
    start = StartRequest(
        rank=0, nnodes=1, fault_count=0, master_addr="a", master_port=1, progress={"p": {"progressCount": 3}}
    )
    assert json.loads(env_of(0, start)["ELASTIPOD_PROGRESS"]) == {"p": {"progressCount": 3}}
    assert "ELASTIPOD_PROGRESS" not in env_of(0)


def test_the_place_of_the_store_is_handed_on_where_an_agent_serves_it() -> None:
    assert env_of(0, replace(START, store_port=8080))["ELASTIPOD_STORE"] == "10.0.0.9:8080"
    assert "ELASTIPOD_STORE" not in env_of(0)


@given(nnodes=st.integers(1, 12), nproc=st.integers(1, 8))
def test_global_ranks_cover_the_world_once(nnodes: int, nproc: int) -> None:
    layout = Layout(nproc=nproc, run_id="r", role="default", max_restarts=0)
    ranks = [
        int(
            env_of(
                local, StartRequest(rank=group, nnodes=nnodes, fault_count=0, master_addr="a", master_port=1), layout
            )["RANK"]
        )
        for group in range(nnodes)
        for local in range(nproc)
    ]
    assert ranks == list(range(nnodes * nproc))


@given(
    rank=st.integers(0, 7),
    local_rank=st.integers(0, 1),
    base=st.dictionaries(
        st.sampled_from(["PATH", "OMP_NUM_THREADS", "RANK", "NNODES", "ELASTIPOD_PROGRESS"]), st.text()
    ),
)
def test_all_workers_of_all_generations_share_the_steady_part(rank: int, local_rank: int, base: dict[str, Any]) -> None:
    start = StartRequest(rank=rank, nnodes=8, fault_count=rank, master_addr="m", master_port=1, generation=rank + 1)
    env = env_of(local_rank, start, **base)
    steady = steady_env(base, LAYOUT)
    assert steady.items() <= env.items()
    assert set(env) - set(steady) <= VOLATILE


def test_a_script_gets_what_is_the_same_for_all_workers_of_the_pod() -> None:
    assert pod_env({"PATH": "/bin", "NNODES": "1"}, START, LAYOUT) == {
        "PATH": "/bin", "NNODES": "3", "NPROC_PER_NODE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "10070",
        "JOB_RESTART_COUNT": "6", "TORCHELASTIC_RESTART_COUNT": "6", "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "ns/job", "ELASTIPOD_GENERATION": "7",
    }  # fmt: skip
