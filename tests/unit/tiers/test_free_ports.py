"""Ports that tests give to their servers: no two processes that test beside each other get the same one."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from tests import free_ports
from tests.free_ports import free_port

SAME_CHOICES = """
import random
from tests import free_ports
free_ports._any_port = random.Random(7)
print(*(free_ports.free_port() for _ in range(5)), flush=True)
input()
"""


def test_tests_that_seed_their_random_numbers_alike_get_different_ports() -> None:
    given = []
    for _ in range(2):
        random.seed(7)
        given.append(free_port())
    assert given[0] != given[1]


def test_a_port_that_nobody_listens_at_yet_is_given_to_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_ports, "_any_port", random.Random(7))
    own = {free_port() for _ in range(5)}
    with subprocess.Popen([sys.executable, "-c", SAME_CHOICES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        others = set(map(int, other.stdout.readline().split()))
        still_own = {free_port() for _ in range(5)}
        other.communicate(b"\n")
    assert len(own | others | still_own) == 15
