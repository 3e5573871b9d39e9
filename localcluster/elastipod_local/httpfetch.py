"""Files over HTTP: opened within a deadline, checked against a checksum, taken out of archives."""

import hashlib
import http.client
import os
import ssl
import tarfile
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elastipod_local.errors import LocalClusterError, is_of_storage
from elastipod_local.registry_access import settings

# `off`, or the URL of a mirror that has below it `<host>/<path>` of what it mirrors. Empty: the hosts themselves.
VARIABLE = "ELASTIPOD_DOWNLOADS"
OPEN_DEADLINE_S = 5.0  # name, connection, redirections and the head of the answer, together
STALL_S = 30.0  # without a byte
BLOCK = 1 << 20
MIB = 1 << 20


@dataclass(slots=True)
class Transfer:
    """How far a download is, for those who show it."""

    size: int = 0
    done: int = 0

    def __str__(self) -> str:
        return f"{self.done // MIB} of {max(self.size, self.done) // MIB} MiB"


def is_switched_off() -> bool:
    return os.environ.get(VARIABLE, "").strip().lower() == "off"


def base_of(url: str) -> str:
    """Give the URL itself, or its place on the mirror that the environment names."""
    mirror = os.environ.get(VARIABLE, "").strip().rstrip("/")
    return f"{mirror}/{url.partition('://')[2]}" if mirror else url


def download(
    url: str, file: Path, checksum: str, transfer: Transfer, *, headers: Mapping[str, str] | None = None
) -> None:
    """Write what the URL gives to a file. checksum: `sha256:...` or `sha512:...`.

    Raises LocalClusterError when the host does not answer within OPEN_DEADLINE_S, the transfer stalls or breaks, or
    the content is another one; the file is not usable then. OSError: the file's disk is full or cannot be written.
    """
    algorithm, _, expected = checksum.partition(":")
    digest = hashlib.new(algorithm)
    host = urllib.parse.urlsplit(url).netloc
    try:
        with _open(url, headers or {}) as answer, file.open("wb") as output:
            transfer.size += int(answer.headers.get("Content-Length") or 0)
            while block := answer.read(BLOCK):
                digest.update(block)
                output.write(block)
                transfer.done += len(block)
    except (OSError, http.client.HTTPException, ValueError) as failed:
        if is_of_storage(failed):
            raise
        said = failed.reason if type(failed) is urllib.error.URLError else failed
        raise LocalClusterError(f"{host}: {said}") from failed
    if digest.hexdigest() != expected:
        raise LocalClusterError(f"{url} has the {algorithm} {digest.hexdigest()}, not {expected}")


def _open(url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """Open a URL through the proxies of the environment.

    Name servers have no deadline of ours: the call is left behind in a thread that ends on its own.
    """
    context = ssl.create_default_context()
    if authority := settings(os.environ, Path.home()).get("SSL_CERT_FILE"):
        context.load_verify_locations(authority)
    request = urllib.request.Request(url, headers={"User-Agent": "elastipod", **headers})  # noqa: S310  # pinned URLs
    answers: list[http.client.HTTPResponse] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            answers.append(urllib.request.urlopen(request, timeout=STALL_S, context=context))  # noqa: S310
        except Exception as failed:  # raised below
            if isinstance(failed, urllib.error.HTTPError):
                failed.close()  # it is an answer, too
            errors.append(failed)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(OPEN_DEADLINE_S)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {OPEN_DEADLINE_S:g} s")
    return answers[0]


def unpack(archive: Path, wanted: Mapping[str, str], into: Path) -> set[str]:
    """Write files of a tar archive, compressed or not, into a folder, executable; give the names that were found.

    wanted: path in the archive -> name in the folder. A path that ends with a slash stands for the files below it.
    Raises LocalClusterError for what is no archive, OSError where the folder's disk is full.
    """
    found = set()
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                target = _target_of(member.name.removeprefix("./"), wanted)
                source = tar.extractfile(member) if target and member.isreg() else None
                if target and source:
                    found.add(target.parts[0])
                    _write(source, into / target)
    except (tarfile.TarError, EOFError, OSError) as broken:
        if is_of_storage(broken):
            raise
        raise LocalClusterError(f"{archive.name} is no readable archive: {broken}") from broken
    return found


def _target_of(path: str, wanted: Mapping[str, str]) -> Path | None:
    if path in wanted:
        return Path(wanted[path])
    for prefix, name in wanted.items():
        below = Path(path.removeprefix(prefix))
        if prefix.endswith("/") and path.startswith(prefix) and not below.is_absolute() and ".." not in below.parts:
            return Path(name) / below
    return None


def _write(source: IO[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as output:
        while block := source.read(BLOCK):
            output.write(block)
    target.chmod(0o755)
