"""Bounds of what a tenant can make large: each limit of the operator is in the table of docs/design/bounds.md, and the other way round."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from tests.lint.sources import Finding, Repository, Source

PAGE = "docs/design/bounds.md"
PACKAGE = "operator/elastipod_operator/"
ROW = re.compile(r"^\| [^|]+ \| [0-9]+ \| `([a-z_.]+)\.([A-Z_0-9]+)` \|", re.MULTILINE)
LIMIT = re.compile(r"MAX_[A-Z0-9_]+|[A-Z_]+_KEPT")
# Constants named like limits that bound nothing a tenant can make large, or follow from one that does.
OTHER = frozenset(
    {
        *(
            "agents.authentication.MAX_TRIES",
            "agents.commands.MAX_PARALLEL",
            "agents.peer_reachability.MAX_NEVER_ANSWERED",
        ),
        *(
            "agents.polls.MAX_HEAD_BYTES",
            "agents.status.MAX_REASON",
            "agents.status.MAX_MESSAGE",
            "agents.status.MAX_EXCESS",
        ),
        *("api.base.MAX_COUNT", "api.base.MAX_INT32", "api.crd.MAX_JSON_BYTES", "clock.MAX_SLEW"),
        *("core.avoided_nodes.MAX_KEPT", "core.faults.MAX_FAULTY_REPLICAS", "core.replica.MAX_GENERATION"),
        *(
            "core.payback.MAX_PACES",
            "core.pod_runs.MAX_READABLE_RUNS",
            "core.record.MAX_TEXT",
            "core.record_codec.MAX_BYTES",
        ),
        *("garbage_collection.MAX_WAIT_S", "kube.applied.MAX_KEPT_DEPTH", "kube.store.MAX_DIGITS"),
        *("queueing.quota_release.MAX_FAILED_RELEASES", "queueing.workload_control.MAX_PARALLEL_CALLS"),
    }
)


def check(repository: Repository) -> Iterator[Finding]:
    """Give the limits that are on one side only."""
    page = next(source for source in repository.sources if source.path == PAGE)
    yield from compare(page, [source for source in repository.python if source.path.startswith(PACKAGE)], OTHER)


def compare(page: Source, sources: Sequence[Source], other: frozenset[str]) -> Iterator[Finding]:
    """Compare the table with the constants of some modules; `other` need no row."""
    constants = {name: (source.path, line) for source in sources for name, line in constants_of(source).items()}
    rows = {
        f"{module}.{name}": page.text[: row.start()].count("\n") + 1
        for row in ROW.finditer(page.text)
        for module, name in [row.groups()]
    }
    for name, line in rows.items():
        if name not in constants:
            yield Finding(
                page.path, line, f"there is no constant {name}; name the module and the constant as they are called now"
            )
    for name, (path, line) in constants.items():
        if LIMIT.fullmatch(name.rpartition(".")[2]) and name not in rows and name not in other:
            yield Finding(
                path, line, f"the limit {name} is not in the table of {PAGE}; add a row that says what is beyond it"
            )


def constants_of(source: Source) -> Mapping[str, int]:
    """Give the constants of a module by their dotted names below the package, with their lines."""
    module = source.path.removeprefix(PACKAGE).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = {}
    whole = source.nodes[0]
    assert isinstance(whole, ast.Module)
    for node in whole.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(name, ast.Name):
                    found[f"{module}.{name.id}"] = node.lineno
        if isinstance(node, ast.ImportFrom):  # a package that hands on a constant of one of its modules
            found.update(
                {f"{module}.{alias.name}": node.lineno for alias in node.names if not LIMIT.fullmatch(alias.name)}
            )
    return found
