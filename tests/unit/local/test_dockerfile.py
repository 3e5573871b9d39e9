"""Reading Dockerfiles: what is understood, what is refused by name, and our own file."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_local.dockerfile import Instruction, Stage, expand, needed, pairs, parse
from elastipod_local.errors import LocalClusterError

CHECKOUT = Path(__file__).resolve().parents[3]


def test_stages_and_instructions() -> None:
    stages = parse(
        """
        # a comment
        FROM debian:bookworm-slim AS base
        RUN apt-get update \\
            # between
            && apt-get install python3
        FROM base
        COPY --from=base --chown=1:2 /a /b /to/
        ENTRYPOINT ["a", "b c"]
        """
    )
    assert list(stages) == ["base", "1"]
    assert stages["base"].instructions == (Instruction("RUN", ("apt-get update && apt-get install python3",), 4),)
    copy, entrypoint = stages["1"].instructions
    assert copy == Instruction("COPY", ("/a", "/b", "/to/"), 8, (("from", "base"), ("chown", "1:2")))
    assert copy.flag("from") == "base"
    assert copy.flag("chmod") is None
    assert entrypoint.words == ("a", "b c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("RUN true", "line 1: RUN stands before the first FROM", id="before FROM"),
        pytest.param("FROM a\nADD x y", "line 2: ADD is not understood", id="unknown instruction"),
        pytest.param("FROM a\nCOPY --link x y", "line 2", id="unknown flag without a value"),
        pytest.param("FROM a\nCOPY --chmod=1 x y", "COPY --chmod is not understood", id="unknown flag"),
        pytest.param("FROM a\nCMD run it", "in the form", id="shell form"),
        pytest.param('FROM a\nRUN ["x"]', "this form of RUN", id="exec form of RUN"),
        pytest.param("FROM a b", "expected FROM image", id="odd FROM"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(LocalClusterError, match=said):
        parse(text)


def test_only_needed_stages_are_built_in_their_order() -> None:
    stages = parse("FROM x AS a\nFROM x AS unused\nFROM a AS b\nFROM x AS c\nCOPY --from=b / /\n")
    assert [stage.name for stage in needed(stages, "c")] == ["a", "b", "c"]
    with pytest.raises(LocalClusterError, match="no stage 'd'"):
        needed(stages, "d")


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$A/${A}", "1/1"), ("${B:-two}", "two"), ("${A:-two}", "1"), ("$NONE-", "-"), ("plain", "plain")],
)
def test_expand(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1"}) == expanded


def test_pairs() -> None:
    assert pairs(("A=1", "B=x=y", "C")) == {"A": "1", "B": "x=y", "C": ""}


def test_arguments_before_the_first_stage_are_for_from() -> None:
    stages = parse("ARG BASE=debian:bookworm-slim\nFROM ${BASE} AS base\nFROM base AS top\nRUN echo $BASE\n")
    assert [(stage.name, stage.base) for stage in stages.values()] == [
        ("base", "debian:bookworm-slim"),
        ("top", "base"),
    ]


PUBLISHED = ("operator", "agent", "training")


def last(stages: dict[str, Stage], name: str, instruction: str) -> tuple[str, ...]:
    """Give the words of the last such instruction of a stage."""
    return [entry.words for entry in stages[name].instructions if entry.name == instruction][-1]


def test_no_published_image_runs_as_root() -> None:
    stages = parse((CHECKOUT / "Dockerfile").read_text())
    users = [last(stages, name, "USER")[0] for name in PUBLISHED]
    assert users == ["65532:65532"] * len(PUBLISHED)
    assert last(stages, "operator", "ENTRYPOINT") == ("elastipod", "operator")


def test_each_published_image_is_made_of_what_it_needs() -> None:
    stages = parse((CHECKOUT / "Dockerfile").read_text())
    parts = {name: {stage.name for stage in needed(stages, name)} for name in PUBLISHED}
    assert "train-dependencies" not in parts["operator"] | parts["agent"], "no torch"
    assert not parts["agent"] & {"code", "operator-dependencies"}, "no operator"
    assert "operator-dependencies" not in parts["training"]


def test_the_one_foreign_image_is_an_argument_of_the_build() -> None:
    text = (CHECKOUT / "Dockerfile").read_text()
    stages = parse(text)
    foreign = {stage.base for stage in stages.values()} - set(stages)
    assert foreign == {"debian:bookworm-slim"}
    assert text.count("debian:bookworm-slim\n") == 1
    assert "ARG DEBIAN=debian:bookworm-slim\nFROM" in text.replace("\n\n", "\n")
