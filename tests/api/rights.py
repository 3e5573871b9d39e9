"""What the operator may do, from the page about it, and what it has done, from the audit log of an API server."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.unit.docs.pages import page

PAGE = "docs/reference/permissions.md"
OPERATOR = "system:serviceaccount:aws-hyperpod:elastipod"  # of the chart, as the tests install it
ROLE = re.compile(r'of (?:Cluster)?Role "(?:aws-hyperpod-)?elastipod')
# API group, resource with its subresource, verb.
Right = tuple[str, str, str]


def told() -> dict[Right, str]:
    """Give the rights of the page, each with the test that proves it where the audit log does not; empty where it does."""
    found: dict[Right, str] = {}
    for group, resource, verbs, _, proof in list(page(PAGE).table_rows("## Each right"))[1:]:
        for verb in re.findall(r"`(\w+)`", verbs):
            right = (group.strip("`").replace("core", ""), resource.strip("`"), verb)
            tests = re.findall(r"`(tests/\S+::\w+)`", proof)
            assert bool(tests) == bool(proof), f"{right} needs a test, not only a reason"
            found[right] = " ".join(tests)
    return found


def audit_flags(folder: Path) -> list[str]:
    """Give the flags of an API server that notes in folder/audit.log what the operator calls, and nothing of others."""
    rules = [{"level": "Metadata", "users": [OPERATOR]}, {"level": "None"}]
    head = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"]}
    policy = folder / "audit-policy.json"
    policy.write_text(json.dumps({**head, "rules": rules}), encoding="utf-8")
    return [f"--audit-policy-file={policy}", f"--audit-log-path={folder / 'audit.log'}"]


def used(log: Path) -> set[Right]:
    """Give the rights that the operator's roles gave it in some call so far."""
    found: set[Right] = set()
    for line in filter(str.strip, log.read_text(encoding="utf-8").splitlines()):
        try:
            event = json.loads(line)
        except ValueError:  # the last one, half written
            break
        reason = event.get("annotations", {}).get("authorization.k8s.io/reason", "")
        if ROLE.search(reason):
            what = event["objectRef"]
            resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
            found.add((what.get("apiGroup", ""), resource, event["verb"]))
    return found
