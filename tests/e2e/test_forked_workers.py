"""A worker that is forked from the fork server must not be told from one that was started with an exec."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import forked_worker_cases
from tests.e2e.warm_start_run import WarmStartRun, make_bare_python, run_warm, without_addresses

PROBE = Path(__file__).with_name("forked_worker_probe.py")
CASES = Path(__file__).with_name("forked_worker_cases.py")
# The interpreter itself loses what a file holds in its buffer when only a daemon thread has it; a forked worker does not.
SAVED = {"leaves_a_file_to_a_daemon_thread": "daemon", "leaves_a_busy_daemon_thread": "busy"}


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the standard library only."""
    return make_bare_python(tmp_path_factory.mktemp("bare"))


def as_file(folder: Path) -> list[str]:
    shutil.copy(PROBE, folder / "train.py")
    return ["train.py"]


def as_link(folder: Path) -> list[str]:
    (folder / "real").mkdir()
    shutil.copy(PROBE, folder / "real" / "train.py")
    (folder / "link.py").symlink_to("real/train.py")
    return [str(folder / "link.py")]


def as_module(folder: Path) -> list[str]:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    shutil.copy(PROBE, folder / "package" / "probe.py")
    return ["-m", "package.probe"]


def as_folder(folder: Path) -> list[str]:
    (folder / "program").mkdir()
    shutil.copy(PROBE, folder / "program" / "__main__.py")
    return ["program"]


def as_run_path(folder: Path) -> list[str]:
    shutil.copy(PROBE, folder / "train.py")
    return ["--run-path", "train.py"]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(as_file, (), id="a file"),
        pytest.param(as_link, ("--redirects=3", "--log-dir=logs"), id="a link, output in files"),
        pytest.param(as_module, ("--tee=3", "--log-dir=logs"), id="a module, output in both", marks=pytest.mark.slow),
        pytest.param(as_folder, (), id="a folder", marks=pytest.mark.slow),
        pytest.param(as_run_path, (), id="runpy", marks=pytest.mark.slow),
    ],
)
def test_a_forked_worker_sees_what_an_executed_one_sees(
    shape: Any, options: tuple[str, ...], tmp_path: Path, bare_python: Path
) -> None:
    seen: dict[bool, dict[str, Any]] = {}
    luck: list[float] = []
    command = shape(tmp_path)
    for is_warm in (False, True):
        reports = tmp_path / "reports"
        reports.mkdir()
        arguments = ["--nproc-per-node=2", *options, *command, "--lr=1", "local ${local_rank}"]
        with run_warm(
            tmp_path, *arguments, python=bare_python, is_warm=is_warm, PROBE_DIR=str(reports), PYTHONWARNINGS="once"
        ) as run:
            run.until_warm()
            run.generation(1, master_port=29400)
            assert run.starts() == ((2, 0) if is_warm else (0, 2)), run.agent.printed()
            report = json.loads((reports / "1-1.json").read_text())
            luck += [json.loads((reports / f"1-{rank}.json").read_text())["luck"] for rank in (0, 1)]
            del report["luck"]
            assert report.pop("parent") == run.agent.process.pid
        shown = report.pop("shown_environ")
        assert f"ELASTIPOD_WORKER_FILE={report['environ']['ELASTIPOD_WORKER_FILE']}" in shown
        assert f"TORCHELASTIC_ERROR_FILE={report['environ']['TORCHELASTIC_ERROR_FILE']}" in shown
        assert report["argv"][-1] == "local 1"
        del report["environ"]["ELASTIPOD_AGENT_PORT"]
        text = without_addresses(json.dumps(report))
        seen[is_warm] = json.loads(text)
        shutil.rmtree(reports)
    assert {name: (seen[True][name], was) for name, was in seen[False].items() if seen[True][name] != was} == {}
    assert seen[True]["death_signal"] == 9
    assert seen[True]["session"] == [True, True]
    assert len(set(luck)) == 4, "forked workers must not share their random numbers"


@pytest.mark.long("variants")
def test_a_forked_worker_ends_as_an_executed_one_does(tmp_path: Path, bare_python: Path) -> None:
    cold = endings(tmp_path / "cold", bare_python, is_warm=False)
    warm = endings(tmp_path / "warm", bare_python, is_warm=True)
    for name, kept in SAVED.items():
        assert warm[name]["files"] == {kept: "data"}
        cold[name]["files"] = warm[name]["files"]
    assert warm == cold
    assert warm["raises"]["failure"]["exitcode"] == 1
    assert [line for line in warm["raises"]["printed"] if "boot.py" in line or "runpy" in line] == []
    assert warm["leaves_objects"]["printed"] == ["[default0]:finalized", "[default0]:generator closed"]
    assert warm["cannot_flush_its_output"]["failure"]["exitcode"] == 120


def endings(folder: Path, python: Path, *, is_warm: bool) -> dict[str, dict[str, Any]]:
    """Run all cases, each as a generation of one agent; gives what each of them left behind."""
    files = folder / "files"
    files.mkdir(parents=True)
    shutil.copy(CASES, folder / "train.py")
    with run_warm(folder, "train.py", python=python, is_warm=is_warm, CASES_DIR=str(files)) as run:
        run.until_warm()
        found = {case.__name__: ending(run, number, files) for number, case in enumerate(forked_worker_cases.CASES, 1)}
        assert run.starts() == ((len(found), 0) if is_warm else (0, len(found))), run.agent.printed()
    return found


def ending(run: WarmStartRun, number: int, files: Path) -> dict[str, Any]:
    before = len(run.lines())
    seen = run.generation(number)
    left = {path.name: path.read_text() for path in sorted(files.iterdir())}
    for path in files.iterdir():
        path.unlink()
    failure = seen["failure"] and {name: value for name, value in seen["failure"].items() if name != "time"}
    result = {"state": seen["status"], "failure": failure, "printed": run.lines()[before:], "files": left}
    own: dict[str, Any] = json.loads(without_addresses(json.dumps(result), run.folder))
    return own


TRAINING = """
import os, sys
before = {"torch", "torch._dynamo", "numpy"} <= set(sys.modules)
threads = len(os.listdir("/proc/self/task"))
import numpy, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([index * index])

@record
def main():
    generation = int(os.environ["ELASTIPOD_GENERATION"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    luck = torch.rand(1, dtype=torch.float64).item()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(2, 4) * (rank + 1)).sum()
        loss.backward()
        optimizer.step()
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")(torch.ones(3)).item()
    draws = [None] * dist.get_world_size()
    dist.all_gather_object(draws, (numpy.random.rand(), luck))
    print("preloaded", before, "threads", threads, "sum", total.item(), f"loss {loss.item():.6f}", compiled,
          "draws", [len(set(kind)) for kind in zip(*draws)], "cuda", torch.cuda.is_initialized(), flush=True)
    if generation == 2 and rank == 0:
        for method in ("fork", "spawn"):
            loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method)
            print(method, [batch.sum().item() for batch in loader], flush=True)
    if generation == 3 and rank == 1:
        raise ValueError("a bad batch")
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.mark.long("variants")
def test_forked_workers_train_as_executed_ones_do(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING, "utf-8")
    with run_warm(tmp_path, "--nproc-per-node=2", "train.py", is_warm=False) as run:
        assert run.generation(1)["status"] == "completed", run.agent.printed()
        cold = sorted(run.lines())
    assert ["sum 3.0" in line and "draws [2, 2] cuda False" in line for line in cold] == [True, True]
    with run_warm(tmp_path, "--nproc-per-node=2", "train.py") as run:
        run.until_warm()
        first, second, third = (run.generation(number) for number in (1, 2, 3))
        warm = run.lines()
        assert run.starts() == (6, 0), run.agent.printed()
    assert (first["status"], second["status"]) == ("completed", "completed"), run.agent.printed()
    assert third["failure"]["global_rank"] == 1
    assert third["failure"]["message"].endswith("ValueError: a bad batch")
    steps = sorted(line for line in warm if "preloaded" in line)
    assert steps == sorted(3 * [line.replace("preloaded False", "preloaded True") for line in cold])
    loaded = [line for line in warm if line.startswith(("[default0]:fork", "[default0]:spawn"))]
    assert loaded == [f"[default0]:{method} [14, 126]" for method in ("fork", "spawn")]
