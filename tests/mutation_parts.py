"""The parts of the product whose mistakes their unit tests must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the product and the unit tests that must notice mistakes in it.

    package: the package that is mutated. not_mutated: modules and packages in it that are not. tests: folders of tests.
    tests_left_out: files in them that are not run. sample: how many mutants are tried unless the caller asks for another number;
    0 for all. memory_gib: the address space of one try; torch's libraries reserve a lot of it.
    """

    package: str
    tests: tuple[str, ...]
    not_mutated: tuple[str, ...] = ()
    tests_left_out: tuple[str, ...] = ()
    sample: int = 300
    memory_gib: int = 3


PARTS = {
    # Left out: two properties over arbitrary facts and the cost of jobs of thousands of pods, which take seconds for each
    # mutant and do not ask what comes out; numbers of calls, which mutmut's own multiply; rules of
    # how the source is written; and a test that holds the core against documents and other parts of the operator.
    "core": Part(
        package="elastipod_operator.core",
        tests=("tests/unit/core",),
        tests_left_out=(
            "tests/unit/core/test_bounds.py",
            "tests/unit/core/test_plan_any_snapshot.py",
            "tests/unit/core/test_plan_scale.py",
            "tests/unit/core/test_reasons.py",
            "tests/unit/core/test_spec_fields.py",
        ),
        sample=0,
    ),
    "shell": Part(
        package="elastipod_operator",
        not_mutated=("elastipod_operator.core", "elastipod_operator.api"),
        tests=(
            "tests/unit/admission",
            "tests/unit/agents",
            "tests/unit/kube",
            "tests/unit/operator_shell",
            "tests/unit/queues",
            "tests/unit/core/test_spec_fields.py",  # each field of a spec in the policy
        ),
        tests_left_out=("tests/unit/kube/test_fuzz.py",),
    ),
    # Not mutated: scripts that an interpreter without the installed packages runs, and so without mutmut's own.
    "agent": Part(
        package="elastipod_agent",
        not_mutated=("elastipod_agent.workers.matcher_process", "elastipod_agent.fork_server.bootstrap"),
        tests=("tests/unit/agent",),
        tests_left_out=("tests/unit/agent/test_program_traceback.py",),  # mutmut's frames are in every traceback
        memory_gib=64,
    ),
    "library": Part(
        package="elastipod",
        # Their packages are not in this environment; tests/e2e/test_frameworks.py and test_trackers.py run them.
        not_mutated=(
            "elastipod.integrations.accelerate",
            "elastipod.integrations.lightning",
            "elastipod.integrations.mlflow",
            "elastipod.integrations.transformers",
            "elastipod.integrations.wandb",
        ),
        # Beside its own: tests of its client for the agent, which a real agent answers.
        tests=(
            "tests/unit/library",
            "tests/unit/checkpoint",
            "tests/unit/in_memory",
            "tests/unit/integrations",
            "tests/unit/recipes",
            "tests/unit/core/test_model_groups.py",  # sizes that keep groups of ranks whole, which both sides compute
            "tests/unit/agent/test_ipc.py",
            "tests/unit/agent/test_ipc_calls.py",
            "tests/unit/agent/test_store_wait.py",
            "tests/unit/agent/test_ipc_names.py",
            "tests/unit/agent/test_worker_file.py",
        ),
        tests_left_out=(
            "tests/unit/library/test_imports.py",  # mutants import what mutmut needs
            "tests/unit/library/test_torch_names.py",  # it reads the source
            "tests/unit/integrations/test_packages.py",  # it reads pyproject.toml, which is mutmut's own there
        ),
        memory_gib=64,
    ),
}
