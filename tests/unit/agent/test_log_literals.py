"""Which literals a matching line must contain, so that other lines need no regular expression."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.core.log_literals import has_leading_wildcard, required_literals


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        pytest.param("loss: ", ["loss: "], id="a text"),
        pytest.param(r"loss: (\S+)", ["loss: "], id="the text before a group"),
        pytest.param(r"\d+ TFLOPs and more", [" TFLOPs and more"], id="the text behind a class"),
        pytest.param(r"ab.*longest.*xyz", ["longest"], id="the longest of several"),
        pytest.param(r"^begin$", ["begin"], id="positions match no characters"),
        pytest.param(r"one\btwo", ["onetwo"], id="a boundary within a text"),
        pytest.param(r"(?:inner text)", ["inner text"], id="a group"),
        pytest.param(r"(?P<name>inner)", ["inner"], id="a named group"),
        pytest.param(r"(?:abc)+", ["abc"], id="repeated at least once"),
        pytest.param(r"(?:abc)+?", ["abc"], id="lazily"),
        pytest.param(r"(?:abc){2,5}", ["abc"], id="so many times"),
        pytest.param(r"(?:abc)*", None, id="perhaps never"),
        pytest.param(r"(?:abc)*?", None, id="perhaps never, lazily"),
        pytest.param(r"(?:abc)?", None, id="optional"),
        pytest.param(r"(?:error|warning)", ["error", "warning"], id="one of two"),
        pytest.param(r"(?:error|\d+)", None, id="one of which has no text"),
        pytest.param(r"(?:error|ab)", None, id="one of which is too short"),
        pytest.param("|".join(f"{n}text" for n in range(8)), [f"{n}text" for n in range(8)], id="eight"),
        pytest.param("|".join(f"{n}text" for n in range(9)), None, id="nine are too many"),
        pytest.param(r"(?:one long text|two long text).*short", ["one long text", "two long text"], id="the longer choice"),
        pytest.param(r"(?:abc|xyz).*end", ["end"], id="of equal length the fewer"),
        pytest.param("ab", None, id="too short"),
        pytest.param("abc", ["abc"], id="just long enough"),
        pytest.param(r"\d+", None, id="no text"),
        pytest.param("", None, id="nothing"),
        pytest.param("(?i)loss", None, id="any case"),
        pytest.param("(?i:loss)", None, id="any case within a group"),
        pytest.param("(?i:loss) of all", [" of all"], id="any case within a group only"),
        pytest.param("naïve café", ["naïve café"], id="not only ASCII"),
        pytest.param("(", None, id="not a pattern"),
        pytest.param(r"\udc80abc", None, id="not text"),
    ],
)  # fmt: skip
def test_the_literals_of_a_pattern(pattern: str, texts: list[str] | None) -> None:
    found = required_literals(pattern)
    assert (None if found is None else sorted(found)) == (None if texts is None else sorted(t.encode() for t in texts))


@pytest.mark.skipif(not hasattr(re, "NOFLAG"), reason="since Python 3.11")
@pytest.mark.parametrize(("pattern", "texts"), [(r"(?>atomic)", (b"atomic",)), (r"(?:abc)++", (b"abc",))])
def test_the_literals_of_newer_syntax(pattern: str, texts: tuple[bytes, ...]) -> None:
    assert required_literals(pattern) == texts


def test_the_literals_of_several_patterns_are_those_of_each_once() -> None:
    assert required_literals("begin", None, "end of it", "begin") == (b"begin", b"end of it")
    assert required_literals("begin", r"\d") is None, "a line may match the second without any text"
    assert required_literals(None) == ()


@pytest.mark.parametrize(
    ("pattern", "is_leading"),
    [
        (".*loss", True),
        (".*", True),
        (".+loss", False),
        (".*?loss", False),
        (".{0,5}loss", False),
        ("[a-z]*loss", False),
        ("(?:ab)*loss", False),
        ("loss.*", False),
        ("", False),
        ("(", False),
    ],
)
def test_a_leading_wildcard(pattern: str, is_leading: bool) -> None:
    assert has_leading_wildcard(pattern) is is_leading


WORDS = st.sampled_from(["loss", "step", "error", "ab", "x"])
PATTERNS = st.recursive(
    WORDS | st.sampled_from([r"\d", ".", r"\b"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@given(pattern=PATTERNS, line=st.lists(WORDS | st.sampled_from(["1", " "]), max_size=8).map("".join))
def test_every_line_that_matches_has_one_of_the_literals(pattern: str, line: str) -> None:
    texts = required_literals(pattern)
    if texts is not None and re.search(pattern, line):
        assert any(text in line.encode() for text in texts)
