"""Token files: what is built is read back, and what is cut off or foreign is refused in one sentence."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import PATIENCE_S

from elastipod import cli
from elastipod.data.token_format import HEADER_BYTES, TokenHeader, bytes_per_token, read_header, verify_tokens
from elastipod.data.tokens import TokenFile, TokenWindows
from elastipod.data.tokens_command import build
from elastipod.errors import DataError

TEXT = "One sentence.\nAnd märchen.\n" * 40


def big_tokens(text: str) -> list[int]:
    return [ord(letter) * 300 for letter in text]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def tokens(tmp_path: Path, text: Path) -> Path:
    build(tmp_path / "text.tokens", [text])
    return tmp_path / "text.tokens"


@pytest.mark.parametrize(("vocabulary", "size"), [(256, 1), (257, 2), (65536, 2), (65537, 4), (1 << 31, 4)], ids=str)
def test_tokens_take_as_few_bytes_as_hold_them(tmp_path: Path, vocabulary: int, size: int) -> None:
    assert bytes_per_token(vocabulary) == size
    (tmp_path / "a").write_text("x")
    highest = [0, vocabulary // 2, vocabulary - 1]
    build(tmp_path / "out", [tmp_path / "a"], tokenize=lambda text: highest, vocabulary=vocabulary)
    assert TokenFile(tmp_path / "out").read(0, 3).tolist() == highest


def test_bytes_come_back_as_they_were(tokens: Path) -> None:
    file = TokenFile(tokens)
    assert bytes(file.read(0, len(file)).tolist()) == TEXT.encode()
    assert file.header == verify_tokens(tokens)


def test_documents_are_files_or_lines_and_end_with_a_token(tmp_path: Path, text: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"zwei")
    header = build(tmp_path / "files", [text, tmp_path / "b.txt"], vocabulary=300, end_of_document=299)
    assert (header.documents, header.tokens) == (2, len(TEXT.encode()) + 4 + 2)
    assert TokenFile(tmp_path / "files").read(header.tokens - 5, 5).tolist() == [*b"zwei", 299]
    by_line = build(tmp_path / "lines", [text], vocabulary=300, end_of_document=299, by_line=True)
    assert (by_line.documents, by_line.tokens) == (80, len(TEXT.encode()))
    assert TokenFile(tmp_path / "lines").read(0, 14).tolist() == [*b"One sentence.", 299]


def test_a_tokenizer_sees_whole_documents(tmp_path: Path, text: Path) -> None:
    build(tmp_path / "out", [text], tokenize=big_tokens, vocabulary=1 << 20)
    file = TokenFile(tmp_path / "out")
    assert file.read(0, len(file)).tolist() == big_tokens(TEXT)


def test_a_tokenizer_may_give_bytes(tmp_path: Path, text: Path) -> None:
    build(tmp_path / "out", [text], tokenize=str.encode, vocabulary=300)
    file = TokenFile(tmp_path / "out")
    assert bytes(file.read(0, len(file)).tolist()) == TEXT.encode()


def test_what_another_build_is_writing_stays(tmp_path: Path, text: Path) -> None:
    others = tmp_path / f"out.{socket.gethostname()}.{os.getpid()}.partial"
    others.write_text("half")
    with pytest.raises(DataError, match=r"out\..*\.partial exists: another build is writing it, or was killed"):
        build(tmp_path / "out", [text])
    assert others.read_text() == "half"


def test_a_mounted_config_map_is_read_once(tmp_path: Path) -> None:
    """Its files are links into a hidden folder, which may be replaced meanwhile."""
    mounted = tmp_path / "texts"
    (mounted / "..2026_01_01").mkdir(parents=True)
    (mounted / "..2026_01_01" / "a.txt").write_text("abc")
    (mounted / "..data").symlink_to("..2026_01_01")
    (mounted / "a.txt").symlink_to("..data/a.txt")
    assert cli.main(["tokens", "build", str(tmp_path / "out"), str(mounted)]) == 0
    assert read_header(tmp_path / "out").tokens == 3


@given(seq_len=st.integers(1, 70), number=st.integers(0, 1000))
def test_windows_follow_one_another_with_one_token_more(
    tmp_path_factory: pytest.TempPathFactory, seq_len: int, number: int
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "a").write_text(TEXT)
    build(folder / "out", [folder / "a"])
    windows = TokenWindows(TokenFile(folder / "out"), seq_len)
    assert len(windows) == (len(TEXT.encode()) - 1) // seq_len
    index = number % len(windows)
    assert bytes(windows[index].tolist()) == TEXT.encode()[index * seq_len : (index + 1) * seq_len + 1]
    assert torch.equal(windows.batch([0, index])[1], windows[index])


def test_another_process_maps_the_file_itself(tokens: Path) -> None:
    windows = pickle.loads(pickle.dumps(TokenWindows(TokenFile(tokens), 8)))
    assert bytes(windows[1].tolist()) == TEXT.encode()[8:17]


def test_writing_into_a_window_changes_no_file(tokens: Path) -> None:
    before = tokens.read_bytes()
    TokenWindows(TokenFile(tokens), 8)[0].zero_()
    assert tokens.read_bytes() == before
    assert TokenFile(tokens).read(0, 1).item() == ord("O")


def test_all_processes_of_a_node_share_the_pages(tokens: Path) -> None:
    """Read to the end, the file costs this process no memory of its own."""
    file = TokenFile(tokens)
    file.read(0, len(file)).sum()
    mappings = Path("/proc/self/smaps").read_text().split(str(tokens))
    own = [int(line.split()[1]) for line in mappings[1].splitlines()[:25] if line.startswith("Private_Dirty:")]
    assert own[:1] == [0]


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut off":
        del data[-1]
    elif how == "cut off in the header":
        del data[HEADER_BYTES - 5 :]
    elif how == "longer":
        data += b"x"
    elif how == "foreign":
        data[:8] = b"GGUF\0\0\0\0"
    elif how == "newer":
        data[8] = 9
    elif how == "header changed":
        data[16] ^= 1
    elif how == "empty":
        data.clear()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut off", "has 1183 bytes, but its 1120 tokens take 1184: it was cut off or changed"),
        ("longer", "has 1185 bytes, but its 1120 tokens take 1184"),
        ("cut off in the header", "is cut off in its header; build it again"),
        ("foreign", "is not a token file; build one with: elastipod tokens build"),
        ("empty", "is not a token file"),
        ("newer", "has format version 9; this elastipod reads version 1"),
        ("header changed", "the header of the token file .* is damaged"),
        ("missing", "cannot read the token file .*: No such file"),
    ],
)
def test_what_is_no_whole_token_file_is_refused_at_opening(tokens: Path, how: str, words: str) -> None:
    if how == "missing":
        tokens.unlink()
    else:
        damaged(tokens, how)
    with pytest.raises(DataError, match=words) as refused:
        TokenFile(tokens)
    assert "\n" not in str(refused.value)


def test_a_changed_token_is_found_by_its_checksum(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(tokens.read_bytes())
    data[-1] ^= 1
    tokens.write_bytes(data)
    assert cli.main(["tokens", "show", str(tokens)]) == 0
    assert cli.main(["tokens", "show", str(tokens), "--verify"]) == 1
    assert "do not have the checksum of the header" in capsys.readouterr().err


def test_opening_reads_the_header_only(tmp_path: Path) -> None:
    """A file of a terabyte, all of it a hole, opens and gives its last window."""
    count = 1 << 40
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.write(TokenHeader(1, count, 256, 1, 0).encode())
        file.truncate(HEADER_BYTES + count)
    windows = TokenWindows(TokenFile(path), 1024)
    assert windows[len(windows) - 1].sum() == 0
    assert read_header(path).tokens == count


def test_the_command_builds_from_folders_and_refuses_to_replace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    for name in ("b", "a"):
        (folder / name).write_text(name * 3)
    output = tmp_path / "out"
    command = ["tokens", "build", str(output), str(tmp_path / "texts")]
    assert cli.main(command) == 0
    assert "6 tokens of 1 bytes in 2 documents, vocabulary 256, written" in capsys.readouterr().out
    assert bytes(TokenFile(output).read(0, 6).tolist()) == b"aaabbb"
    assert cli.main(command) == 1
    assert "exists; name another file, or replace it with --force" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_words.py").write_text("def split(text):\n    return [7, 8]\n")
    assert cli.main([*command, "--force", "--tokenizer", "my_words:split", "--vocabulary", "9"]) == 0
    assert TokenFile(output).read(0, 4).tolist() == [7, 8, 7, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokenizer", "no_such_module:f"], "--tokenizer no_such_module:f cannot be loaded"),
        (["--tokenizer", "json:loads"], "--vocabulary is needed with --tokenizer json:loads"),
        (["--tokenizer", "builtins:list", "--vocabulary", "9"], "that is not a token"),
        (["--tokenizer", "builtins:ascii", "--vocabulary", "9"], "that is not a token"),
        (["--end-of-document", "256"], "the token 256 for ends of documents is not below the vocabulary of 256"),
        (["--vocabulary", "100"], "gave the token 195"),
        (["--vocabulary", "-1"], "the vocabulary is -1; it must be 1 to 2**31"),
    ],
)
def test_a_build_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.main(["tokens", "build", str(tmp_path / "out"), str(text), *arguments]) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_texts_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"M\xe4rchen")
    with pytest.raises(DataError, match=r"latin is not UTF-8 text: .* at byte 1"):
        build(tmp_path / "out", [tmp_path / "latin"], tokenize=big_tokens, vocabulary=1 << 20)
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="the texts contain no tokens"):
        build(tmp_path / "out", [tmp_path / "empty"])
    with pytest.raises(DataError, match=r"cannot write .*gone"):
        build(tmp_path / "out", [tmp_path / "gone"])
    build(tmp_path / "ok", [tmp_path / "latin"])
    with pytest.raises(DataError, match="has 7 tokens, not enough for one window of 7"):
        TokenWindows(TokenFile(tmp_path / "ok"), 7)
    with pytest.raises(IndexError, match="tokens 5 to 8 are outside of the 7 tokens"):
        TokenFile(tmp_path / "ok").read(5, 3)


def built(folder: Path, output: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Build as users do, in a process that may have others beside it, which get small pieces of the text."""
    (folder / "mine.py").write_text(TOKENIZERS)
    code = (
        "import sys; from elastipod.cli import main; from elastipod.data import tokenizing;"
        "tokenizing._BATCH_BYTES = 1 << 16; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "tokens", "build", output, "texts", "--vocabulary=1000", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


TOKENIZERS = """
import os
def encode(text):
    return [ord(letter) % 997 for letter in text]
def killed(text):
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--lines"]], ids=["files", "lines"])
def test_any_number_of_processes_builds_the_same_file(tmp_path: Path, options: list[str]) -> None:
    """A line or file may be of any length, and the pieces that are handed out end anywhere."""
    (tmp_path / "texts").mkdir()
    for number in range(5):
        text = f"{number} märchen\n\r\n" * (2_000 * number) + "x" * 3_000 * number
        (tmp_path / "texts" / f"{number}.txt").write_bytes(text.encode())
    options = [*options, "--tokenizer=mine:encode", "--end-of-document=999"]
    said = [built(tmp_path, workers, f"--workers={workers}", *options) for workers in "123"]
    assert [done.returncode for done in said] == [0, 0, 0], said
    one, *others = ((tmp_path / workers).read_bytes() for workers in "123")
    assert len(one) > 6 << 16, "several pieces for each process"
    assert [other == one for other in others] == [True, True]
    documents = 2 * sum(2_000 * number for number in range(5)) + 4 if "--lines" in options else 5
    assert read_header(tmp_path / "1").documents == documents


@pytest.mark.parametrize(
    ("tokenizer", "text", "words"),
    [
        ("encode", b"\xff\xfe", "texts/latin is not UTF-8 text: invalid start byte at byte 0"),
        ("killed", b"text", "a tokenizing process has ended: it ran out of memory, or the tokenizer ended it"),
    ],
    ids=["in a process", "to a process"],
)
def test_what_goes_wrong_in_other_processes_is_told_by_this_one(
    tmp_path: Path, tokenizer: str, text: bytes, words: str
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "latin").write_bytes(text)
    done = built(tmp_path, "out", "--workers=2", f"--tokenizer=mine:{tokenizer}")
    assert (done.returncode, done.stderr) == (1, f"elastipod tokens: {words}\n")
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"mine.py", "texts"}, "nothing of the output"


def test_processes_that_cannot_be_had_are_refused(tmp_path: Path, text: Path) -> None:
    for workers, words in ((2, "the tokenizer cannot be passed to other processes"), (0, "workers is 0; it must be")):
        with pytest.raises(DataError, match=words):
            build(tmp_path / "out", [text], tokenize=lambda text: [1], workers=workers)
    assert list(tmp_path.iterdir()) == [text]


def test_a_build_does_not_read_what_builds_have_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("hello world")
    (folder / "corpus.tokens.host.123.partial").write_bytes(b"of a killed build")
    command = ["tokens", "build", str(folder / "corpus.tokens"), str(folder)]
    assert cli.main(command) == 0
    first = (folder / "corpus.tokens").read_bytes()
    assert cli.main([*command, "--force"]) == 0
    assert (folder / "corpus.tokens").read_bytes() == first
    capsys.readouterr()
    assert cli.main(["tokens", "build", str(folder / "a.txt"), str(folder / "a.txt"), "--force"]) == 1
    assert "a.txt is the text and the output; name another output" in capsys.readouterr().err
    assert (folder / "a.txt").read_text() == "hello world"
