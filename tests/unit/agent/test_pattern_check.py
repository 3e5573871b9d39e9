"""Patterns that compile quickly, by the operator's word and by the agent's."""

from __future__ import annotations

import re
import time

import pytest

from elastipod_agent.core import pattern_check as of_agent
from elastipod_operator.api import pattern_check as of_operator

QUICK = [
    r"loss: (\d+\.\d+)",
    r"(?i)cuda error|nccl error|xid[ :]+\d+",
    "|".join(rf"\[rank{number}\]: \w+ \d+ [a-z]" for number in range(60)),
    "损失[：:] ?[0-9.]+ [一-龥]+",
    "(?i)" + "[a-z]" * 64,
    "(?i)[Ā-\uffff][а-я]",
    "a" * 4096,
    "",
]
SLOW = ["(?i)" + "[Ā-\uffff]" * 3, "(?:[一-龥](?=[一-龥])|(?<![一-龥])x)?", "(?i)" + "[a-z]" * 65]


@pytest.mark.parametrize("pattern", QUICK)
def test_what_people_write_is_allowed_by_both(pattern: str) -> None:
    of_agent.check_compile_time(pattern)
    of_operator.check_compile_time(pattern)


@pytest.mark.parametrize("pattern", SLOW)
def test_what_takes_long_is_refused_by_both_with_the_same_words(pattern: str) -> None:
    said = []
    for each in (of_agent, of_operator):
        with pytest.raises(ValueError, match="are allowed, because more take long to compile") as refused:
            each.check_compile_time(pattern)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_the_check_of_a_pattern_takes_a_small_part_of_the_time_that_it_saves() -> None:
    pattern = "(?i)" + "[Ā-\uffff]" * 100
    began = time.process_time()
    with pytest.raises(ValueError, match="100 of these"):
        of_agent.check_compile_time(pattern)
    checked = time.process_time()
    re.purge()
    re.compile(pattern)
    assert checked - began < (time.process_time() - checked) / 2
