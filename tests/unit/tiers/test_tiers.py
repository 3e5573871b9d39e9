"""Running the tiers says no more than what was run: names that do not exist and tiers without a test are no success."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests import tiers
from tests.long_runs import long_names

from elastipod_local.errors import LocalClusterError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pytest is called with. It ends as `ends` of the module says: 0 when nothing else is set."""
    made: list[list[str]] = []
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(tiers, "_announce", lambda names: None)
    monkeypatch.setattr(tiers, "_prepare", lambda tier: "")
    monkeypatch.setattr(tiers, "_write_report", lambda outcome: None)

    def run(arguments: Sequence[str], say: tiers.Say, before: Sequence[str] = ()) -> tiers.Ended:
        made.append(list(arguments))
        say("one test after the other")
        name = arguments[0].rsplit("/", 1)[-1]
        return tiers.Ended(ENDS.get(name, 0), "a line", tuple(FAILED.get(name, ())))

    monkeypatch.setattr(tiers, "_run_pytest", run)
    monkeypatch.setattr(
        tiers, "_lint", lambda say: tiers.Outcome(tiers.LINT, ENDS.get("lint", 0) == 0, "linted", False)
    )
    ENDS.clear()
    FAILED.clear()
    return made


ENDS: dict[str, int] = {}
FAILED: dict[str, list[str]] = {}


def test_a_long_run_that_does_not_exist_is_refused_with_the_names_of_all(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiers.main(["--long", "kil-storm", "unit", "e2e"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("there is no long run 'kil-storm'; there are ")
    assert {"save-kill", "power-loss", "mutation", "sim"} <= set(said.split("there are ")[1].strip().split(", "))
    assert calls == []


@pytest.mark.parametrize("name", ["sim", ""])
def test_a_long_run_that_exists_and_all_of_them_are_run(calls: list[list[str]], name: str) -> None:
    assert name == "" or name in long_names()
    ENDS["unit"] = tiers.NO_TESTS_COLLECTED
    assert tiers.main(["--long", name, "unit", "sim"]) == 0
    assert [call[-1] for call in calls] == [f"--long={name}"] * 2


def test_a_filter_that_selects_nothing_in_any_tier_is_no_success(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    ENDS.update(unit=tiers.NO_TESTS_COLLECTED, sim=tiers.NO_TESTS_COLLECTED)
    assert tiers.main(["unit", "sim", "--", "-k", "typo"]) == 2
    assert "no test was selected" in capsys.readouterr().err
    ENDS.pop("sim")
    assert tiers.main(["unit", "sim", "--", "-k", "name"]) == 0


@pytest.mark.parametrize("status", [1, 2, 3, 4, tiers.NO_TESTS_COLLECTED, -9])
def test_a_whole_tier_succeeds_only_if_pytest_does(calls: list[list[str]], status: int) -> None:
    ENDS["sim"] = status
    assert tiers.main(["unit", "sim"]) == 1
    assert tiers.main(["unit"]) == 0


@pytest.mark.parametrize("cpus", [1, 2, 5, 64])
def test_whole_tiers_run_in_lanes_and_each_of_their_parts_once(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    assert tiers.main(list(tiers.PARTS)) == 0
    ran = [(call[0].rsplit("/", 1)[-1], tuple(call[1 : -len(tiers.SLOWEST)])) for call in calls]
    lanes = tiers.lanes_of(cpus, is_quick=False)
    assert sorted(ran) == sorted(one for lane in lanes for one in lane if one[0] != tiers.LINT)
    for lane in lanes:
        assert [one for one in ran if one in lane] == [one for one in lane if one[0] != tiers.LINT], (
            "one after the other"
        )
    said = capsys.readouterr().out
    assert all(f"{tier:5} | one test after the other" in said for tier in tiers.PARTS)
    counts = {tier: sum(one == tier for one, _ in ran) for tier in tiers.PARTS}
    assert said.endswith("\n".join(tier + count * "\na line" for tier, count in counts.items()) + "\n")


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("cpus", [1, 3, 64])
def test_the_lanes_have_every_test_of_each_tier(cpus: int, is_quick: bool) -> None:
    parts = [one for lane in tiers.lanes_of(cpus, is_quick=is_quick) for one in lane]
    assert {tier for tier, _ in parts} == {*tiers.PARTS, tiers.LINT}
    shares = [part[0] for tier, part in parts if tier == "unit"]
    assert shares == [f"--share={number}/{len(shares)}" for number in range(1, min(cpus, 8) + 1)]
    assert sorted(part[1] for tier, part in parts if tier == "e2e") == ["cluster", "not cluster"]


def test_slow_tests_are_left_out_of_all_tiers_together_only_and_leave_no_report(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is proven is told of a run of all tests, and whoever asks for one tier gets all of it."""
    reported: list[str] = []
    monkeypatch.setattr(tiers, "_write_report", lambda outcome: reported.append(outcome.tier))
    assert tiers.main(["--quick", "unit", "sim"]) == 0
    assert ["--quick" in call for call in calls] == [True, True]
    assert reported == []
    calls.clear()
    assert tiers.main(["unit", "sim"]) == tiers.main(["sim"]) == 0
    assert ["--quick" in call for call in calls] == [False] * 3
    assert reported == ["unit", "sim", "sim"]


def test_a_tier_fails_with_any_of_its_parts_and_the_others_run(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ENDS["e2e"] = 1
    assert tiers.main(list(tiers.PARTS)) == 1
    assert len(calls) == sum(map(len, tiers.PARTS.values()))
    calls.clear()
    monkeypatch.setattr(tiers, "_prepare", lambda tier: "no compiler" if tier == "api" else "")
    ENDS.clear()
    assert tiers.main(["unit", "api", "chart"]) == 1
    assert {call[0].rsplit("/", 1)[-1] for call in calls} == {"unit", "chart"}


def test_a_tier_without_a_test_is_no_success(calls: list[list[str]]) -> None:
    assert tiers.main(["fields"]) != 0
    assert calls == []


def test_lint_fails_the_run_and_is_no_test(calls: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert tiers.main(["lint", "unit", "sim"]) == 0
    assert "\nlint\nlinted\nunit\n" in capsys.readouterr().out
    ENDS["lint"] = 2
    assert tiers.main(["lint", "unit", "sim"]) == 1
    assert tiers.main(["lint", "unit", "--", "-k", "name"]) == 1
    ENDS.update(lint=0, unit=tiers.NO_TESTS_COLLECTED)
    assert tiers.main(["lint", "unit", "--", "-k", "typo"]) == 2


def test_what_a_command_prints_is_passed_on_and_its_status_given() -> None:
    shown: list[str] = []
    assert tiers._run(["sh", "-c", "echo one; echo two; exit 4"], shown.append) == 4
    assert shown == ["one", "two"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalClusterError("the build failed"), "the build failed"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (subprocess.TimeoutExpired(["debootstrap"], 1800), "`debootstrap` did not end within 1800 s"),
    ],
)
def test_what_cannot_be_prepared_fails_its_tier_with_a_sentence(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tier: str, *, progress: object) -> None:
        raise error

    monkeypatch.setattr("tests.conftest.why_no_cluster", lambda: None)
    monkeypatch.setattr("tests.preparation.prepare_tier", fail)
    assert tiers.run_tier("e2e", []) == tiers.Outcome("e2e", False, said)


def test_what_failed_is_known_by_its_whole_name(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(
        "import pytest\n\n\ndef test_good() -> None:\n    pass\n\n\n"
        "@pytest.mark.parametrize('how', ['a - b', 'good'])\n"
        "def test_some(how: str) -> None:\n    assert how == 'good'\n"
    )
    shown: list[str] = []
    ended = tiers._run_pytest([str(tmp_path)], shown.append)
    assert ended.status == 1
    assert [name.rsplit("/", 1)[-1] for name in ended.failed] == ["test_two.py::test_some[a - b]"]
    assert tiers.CLOSING_LINE.match(ended.line)
    assert any(line.startswith("FAILED") for line in shown)
    assert tiers._run_pytest([str(tmp_path), "-k", "good"], shown.append).failed == ()


def test_what_failed_is_named_again_at_the_very_end(calls: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Output of several tiers is thousands of lines; whoever reads the end only must see which test it was."""
    ENDS["sim"] = 1
    FAILED["sim"] = ["tests/sim/test_one.py::test_a[b c]"]
    assert tiers.main(["unit", "sim"]) == 1
    assert capsys.readouterr().out.endswith("sim\nFAILED tests/sim/test_one.py::test_a[b c]\na line\n")


ALONE = "test_real.py::test_alone"


def test_a_report_that_cannot_be_written_is_told_after_the_outcomes(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for a user after `sudo make test`: the folder of reports is root's."""

    def refuse(outcome: tiers.Outcome) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/x/.run/tests/unit.json")

    monkeypatch.setattr(tiers, "_write_report", refuse)
    assert tiers.main(["unit", "sim"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("unit\na line\nsim\na line\n")
    assert said.err == "".join(
        f"the report of {tier} was not written: [Errno 13] Permission denied: '/x/.run/tests/unit.json'\n"
        for tier in ("unit", "sim")
    )


def test_a_test_that_passes_alone_is_flaky_and_named(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    ENDS["api"] = 1
    FAILED["api"] = [ALONE]
    assert tiers.main(["unit", "api"]) == 0
    assert calls[-1] == [ALONE]
    assert f"FLAKY {ALONE}: it failed beside other tests, above, and passed alone\na line" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ends", "failed"),
    [
        pytest.param({"api": 1, ALONE: 1}, {"api": [ALONE]}, id="it fails alone too"),
        pytest.param({"api": 1, "other": 1}, {"api": [ALONE, "other"]}, id="another fails alone too"),
        pytest.param({"sim": 1}, {"sim": [ALONE]}, id="a schedule in virtual time"),
        pytest.param({"api": 1}, {"api": [f"{ALONE}_{n}" for n in range(4)]}, id="too many"),
        pytest.param({"api": 1, "chart": 1}, {"api": ["a", "b"], "chart": ["c", "d"]}, id="too many of two tiers"),
        pytest.param({"api": 3}, {"api": [ALONE]}, id="pytest itself failed"),
        pytest.param({"api": 1}, {}, id="pytest names none"),
        pytest.param({"api": 1, "sim": 1}, {"api": [ALONE]}, id="another tier failed"),
    ],
)
def test_everything_else_that_fails_is_a_failure(
    ends: dict[str, int], failed: dict[str, list[str]], calls: list[list[str]]
) -> None:
    ENDS.update(ends)
    FAILED.update(failed)
    assert tiers.main(["unit", "sim", "api", "chart"]) == 1


def test_a_tier_that_is_run_by_itself_repeats_nothing(calls: list[list[str]]) -> None:
    ENDS["api"] = 1
    FAILED["api"] = [ALONE]
    assert tiers.main(["api"]) == 1
    assert len(calls) == 1
