"""What it costs our agent to carry what workers print. The load and its counting console are those of the e2e tests."""

from __future__ import annotations

from bench.common.processes import Failed, Processes
from bench.launchers.session import Session
from tests.e2e.output_load import TYPICAL_RULES, OutputLoad, run_load

RATE_MB_S = 10.0
WATCHED_S = 10.0
SHORT_OF_RATE = 0.95  # a load that does not come to its rate says nothing


class OutputSession(Session):
    """One worker that prints at a rate, without log rules and with the usual ones; lines are counted behind the agent."""

    def run_agents(self, processes: Processes) -> None:
        for name, rules in (("output", []), ("output with log rules", TYPICAL_RULES)):
            with self._event(name):
                folder = self.folder / name.replace(" ", "-")
                folder.mkdir()
                try:
                    load = run_load(folder, rate_mb_s=RATE_MB_S, seconds=WATCHED_S, rules=rules)
                except AssertionError as error:  # how the helpers of the tests say what they waited for
                    raise Failed(str(error)) from error
                if load.printed_mb_s < SHORT_OF_RATE * RATE_MB_S:
                    raise Failed(f"the worker printed {load.printed_mb_s:.1f} MB/s instead of {RATE_MB_S:g}")
                self._add(f"{name}, cpu", load.agent_percent + load.matcher_percent)
                self._add(f"{name}, wrong lines", wrong_lines(load))


def wrong_lines(load: OutputLoad) -> int:
    """Give at least 1 when a line was lost, torn, repeated or out of order; one that came twice makes up for none that is lost."""
    return abs(load.num_expected - load.num_lines) + load.num_wrong
