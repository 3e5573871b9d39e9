"""Takes out of text what looks like a secret. Pure.

Nobody can tell every secret: these are the forms in which scripts, libraries and clouds usually write them. Every pattern takes time
that grows with the text, not with its square: it begins with a fixed word, and what it repeats is bounded or ends at the next
such word.
"""

from __future__ import annotations

import re

REDACTED = "REDACTED"
# Words in the names of secrets. Tokenizers are none.
WORDS = r"(?:password|passwd|passphrase|secret|token(?!i[sz])|api[-_]?key|access[-_]?key|private[-_]?key|credential|authorization|cookie)"
SECRET_NAME = re.compile(rf"(?i){WORDS}")
# Names of numbers that training scripts and Kubernetes count.
COUNT_NAME = re.compile(r"(?i)tokens|token[-_]?(?:count|limit|budget|length|len|size|num|id)|seconds$")
_NUMBER = re.compile(r"[\"']?[\d.,_]+(?:[eE][+-]?\d+)?[kKMGTB]?[\"']?(?=[)\]},;&]|$)")
_QUOTE = r"\\{0,8}[\"']"
# In quotes, in quotes that are escaped because they stand in a string of JSON, or up to the next space.
_VALUE = r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|(?P<escaped>\\{1,8}[\"']).*?(?P=escaped)|[^\s\"']\S*|[\"']\S*)"
_NAMED = re.compile(rf"(?i)(?P<name>{WORDS}[\w.-]{{0,64}})(?P<sign>(?:{_QUOTE})?\s{{0,8}}[=:]\s{{0,8}}){_VALUE}")
_OPTION = re.compile(
    rf"(?i)(?P<name>(?<![\w-])--?[\w-]{{0,64}}{WORDS}[\w-]{{0,64}})(?P<sign>[ \t]{{1,8}})(?!-){_VALUE}"
)
_FORMS = (
    # Headers go to their end: their values have several words.
    (
        re.compile(rf"(?i)((?:authorization|cookie)(?:{_QUOTE})?\s{{0,8}}[=:]\s{{0,8}}(?:{_QUOTE})?)[^\"'\\\r\n]+"),
        r"\1",
    ),
    (re.compile(r"(?i)(\bbearer\s{1,8})[\w.~+/=-]+"), r"\1"),
    (re.compile(r"(\bBasic )[A-Za-z0-9+/]{8,}={0,2}(?![\w+/])"), r"\1"),
    (re.compile(r"(://)[^\s/\"'<>]+(?=@)"), r"\1"),
    (re.compile(r"((?<!\S)(?:-u|--user)[ =])[^\s:]+:\S+"), r"\1"),
    (re.compile(r"(?i)([?&](?:sig|signature|x-amz-signature|x-amz-credential|x-goog-signature)=)[^\s&\"'<>]+"), r"\1"),
    (re.compile(r"(?s)(-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----).*?(?:(?=-----END)|\Z)"), r"\1"),
    # Keys of well-known forms: AWS, Hugging Face, GitHub, GitLab, Slack, Google, npm, Docker, OpenAI and others, NVIDIA, JWT.
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:(?:AKIA|ASIA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|"
            r"glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{20,}|dckr_pat_[\w-]{16,})"
        ),
        "",
    ),
    (re.compile(r"(?<![\w-])(?:(?:sk|nvapi)-[\w-]{16,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"), ""),
)
LINE_LIMIT = 8192


def redacted_text(text: str) -> str:
    """Give text without what looks like a secret."""
    for pattern, kept in _FORMS:
        text = pattern.sub(rf"{kept}{REDACTED}", text)
    return _without_named(_without_named(text, _NAMED), _OPTION)


def _without_named(text: str, pattern: re.Pattern[str]) -> str:
    """Give text without values that stand behind a name of a secret. A count ends where its number does: more may follow it."""
    parts: list[str] = []
    at = 0
    while found := pattern.search(text, at):
        begins = found.start("value")
        number = _NUMBER.match(found["value"]) if COUNT_NAME.search(found["name"]) else None
        end = begins + number.end() if number else found.end("value")
        parts += [text[at:begins], number[0] if number else REDACTED]
        at = end
    return "".join([*parts, text[at:]])


def with_short_lines(text: str) -> str:
    """Cut each line to LINE_LIMIT characters: a script may print a whole file as one line."""
    return "\n".join(
        line if len(line) <= LINE_LIMIT else f"{line[:LINE_LIMIT]} ... ({len(line) - LINE_LIMIT} more characters)"
        for line in text.split("\n")
    )
