"""Settings of the workers' output: which streams of which ranks go to files or the console, and which lines."""

from __future__ import annotations

import re
import string
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from elastipod_agent.arguments import BadUsage, CommandLine


@dataclass(frozen=True, slots=True)
class StreamSelection:
    """Selects output streams of a worker with torch's bits: 1 stdout, 2 stderr."""

    everywhere: int = 0
    by_rank: Mapping[int, int] | None = None

    def of(self, local_rank: int) -> int:
        """Give the bits for one local rank."""
        return self.everywhere if self.by_rank is None else self.by_rank.get(local_rank, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Where worker output goes. directory: for files, None if there are none. filters: select the lines to copy."""

    directory: Path | None
    redirects: StreamSelection
    tee: StreamSelection
    prefix: string.Template
    only_local_ranks: frozenset[int] | None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()

    def direct_streams(self, local_rank: int) -> int:
        """Give the bits of the streams that a worker writes into a file itself, unless somebody reads them."""
        return self.redirects.of(local_rank) & ~self.tee.of(local_rank)

    def without_files(self) -> LogSettings:
        """Give settings with which everything goes to the console."""
        nothing = StreamSelection()
        return replace(self, directory=None, redirects=nothing, tee=nothing, stdout_filters=(), stderr_filters=())


def read_log_settings(command_line: CommandLine, environ: Mapping[str, str], run_id: str) -> LogSettings:
    values = command_line.values
    template = values.log_line_prefix_template or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    redirects = parse_stream_selection("--redirects", values.redirects)
    tee = parse_stream_selection("--tee", values.tee)
    filters = [parse_filters(text) for text in (values.duplicate_stdout_filters, values.duplicate_stderr_filters)]
    has_files = redirects != StreamSelection() or tee != StreamSelection() or any(filters)
    return LogSettings(
        directory=_log_directory(values.log_dir, run_id, has_files=has_files),
        redirects=redirects,
        tee=tee,
        prefix=string.Template(template or "[${role_name}${local_rank}]:"),
        only_local_ranks=_local_ranks(values.local_ranks_filter),
        stdout_filters=filters[0],
        stderr_filters=filters[1],
    )


def _log_directory(given: str | None, name: str, *, has_files: bool) -> Path | None:
    """Create a directory for this agent, as torchrun does: the pods of a job may share the directory that is given."""
    if not given and not has_files:
        return None
    try:
        if given:
            Path(given).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=re.sub(r"[^\w.-]", "_", name) + "_", dir=given))
    except OSError as error:
        place = given or tempfile.tempdir  # `gettempdir` may raise the same error again
        what = "is not given, and none can be made" if place is None else f"{place} cannot be written"
        raise BadUsage(f"--log-dir {what}: {error.strerror}") from error


def parse_stream_selection(option: str, text: str) -> StreamSelection:
    """Parse torch's notation: one value 0-3 for all workers, or ``RANK:VALUE,...``. Raises BadUsage."""
    if re.fullmatch(r"[0-3]", text):
        return StreamSelection(int(text))
    if re.fullmatch(r"[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        pairs = [pair.split(":") for pair in text.split(",")]
        return StreamSelection(by_rank={int(rank): int(bits) for rank, bits in pairs})
    raise BadUsage(f"{option} is {text!r}; it must be 0 to 3, or such a value for each local rank like 0:1,1:3")


def parse_filters(text: str) -> tuple[str, ...]:
    """Parse torch's list of texts: separated by commas; two commas stand for a comma within a text; empty texts are ignored."""
    parts = [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]
    return tuple(part for part in parts if part)


def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise BadUsage(f"--local-ranks-filter is {text!r}; it must be a list of local ranks like 0,1")
    return frozenset(int(rank) for rank in text.split(","))
