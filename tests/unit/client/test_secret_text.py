"""What is taken out of text because it looks like a secret, and what is not."""

from __future__ import annotations

import json
import time

import pytest

from elastipod_client.secret_text import LINE_LIMIT, redacted_text, with_short_lines

SECRET = "correct-horse-battery"
# Parts, so that nobody takes them for leaked keys.
GITHUB, OPENAI = "github" + "_pat_11ABCDEFG0aBcDeFgHiJkL_" + "x" * 40, "sk" + "-proj-" + "Ab1" * 12
TELEGRAM = "123456789:AAH" + "x" * 30
PRIVATE_KEY = (
    "-----BEGIN RSA PRIVATE KEY-----\\nMIIEow" + "A" * 40 + "\\n-----END RSA PRIVATE KEY-----".replace("\\n", "\n")
)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        pytest.param(f"train --wandb-api-key {SECRET} --lr 1", SECRET, id="behind its option"),
        pytest.param(f"login --password {SECRET}", SECRET, id="a password behind its option"),
        pytest.param(f"--password=ab;{SECRET}", SECRET, id="with a semicolon in it"),
        pytest.param(f"tokens=5,password={SECRET}", SECRET, id="behind a count"),
        pytest.param("password=12345678", "12345678", id="a password of digits"),
        pytest.param("token=12345678-1234-1234", "1234-1234", id="a token that begins with digits"),
        pytest.param(f"token={TELEGRAM}", "AAHx", id="a token of Telegram"),
        pytest.param(f"'password': '{SECRET} two'", "two", id="with a space in quotes"),
        pytest.param(json.dumps({"said": json.dumps({"api_key": SECRET})}), SECRET, id="in JSON in JSON"),
        pytest.param(
            json.dumps(json.dumps({"a": json.dumps({"token": SECRET})})), SECRET, id="in JSON in JSON in JSON"
        ),
        pytest.param("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz", id="a header"),
        pytest.param('{"Authorization": "Token abcdef012345"}', "abcdef012345", id="a header in JSON"),
        pytest.param("Cookie: session=abcdef012345; other=1", "abcdef012345", id="a cookie"),
        pytest.param("curl -u me:hunter22 http://host", "hunter22", id="an option of curl"),
        pytest.param(f"redis://:{SECRET}@host:6379/0", SECRET, id="an address without a user"),
        pytest.param(f"https://{SECRET}@host/x.git", SECRET, id="an address with a token"),
        pytest.param(f"https://{SECRET}:x-oauth-basic@host/x.git", SECRET, id="an address with a token as user"),
        pytest.param(f"postgres://me:p@{SECRET}@host/db", SECRET, id="an address whose password has an @"),
        pytest.param(f"https://a.blob/x?sv=1&sig={SECRET}&se=2", SECRET, id="a signed address"),
        pytest.param(f"cloned with {GITHUB}", GITHUB, id="a token of GitHub"),
        pytest.param(f"called with {OPENAI}", OPENAI, id="a key of OpenAI"),
        pytest.param(f"key {PRIVATE_KEY} end", "MIIEow", id="a private key"),
        pytest.param("-----BEGIN PRIVATE KEY-----\nMIIEow\nAAAA", "MIIEow", id="the beginning of a private key"),
    ],
)
def test_what_looks_secret_goes(text: str, secret: str) -> None:
    found = redacted_text(text)
    assert secret not in found
    assert "REDACTED" in found


@pytest.mark.parametrize(
    "text",
    [
        "tokens=8192", "tokens_per_second: 1234.5, loss 3", "ValueError: boom", "http://host:8080/status",
        "serviceAccountName: elastipod", "imagePullSecrets", "tokens=8192,batch=3", '{"num_tokens": 8192}',
        "tokenizer: gpt2", "--tokenizer gpt2", "--max-tokens 4096", "per-token loss 3.2", "disk-usage-of-a-node-is-high",
        'secret "data" not found', "tokens/s: 12", "tokens=1.5e6 lr=0.1",
    ],
)  # fmt: skip
def test_what_explains_stays(text: str) -> None:
    assert redacted_text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "a" * 8000, "-" * 8000, "token" * 1600, "password-" * 900, "eyJ-" * 2000, "://" * 2700, 'token="' * 1200, "\\" * 8000,
        'token=\\"' * 900, "-----BEGIN PRIVATE KEY-----" * 300, "authorization:" * 600, "a=" * 4000, "bearer " * 1100,
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_long_lines_take_little_time(text: str) -> None:
    began = time.process_time()
    redacted_text(text)
    assert time.process_time() - began < 1.0


def test_long_lines_are_cut() -> None:
    line = "x" * (LINE_LIMIT + 5)
    assert with_short_lines(f"a\n{line}\nb") == f"a\n{line[:LINE_LIMIT]} ... (5 more characters)\nb"
