"""The webhook's certificates over months, and over changes of the install key."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from elastipod_operator.admission.certificates import (
    SERVES_FOR,
    SIGNS_FOR,
    CertificateError,
    Files,
    Pair,
    SelfMade,
)

NEW, OLD = b"n" * 32, b"o" * 32
START = datetime(2026, 3, 1, tzinfo=UTC)


def leaf(pair: Pair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.certificate)


def trusts(bundle: bytes, pair: Pair, at: datetime, name: str = "webhook.team.svc") -> bool:
    """Whether a client that knows the bundle accepts the pair at this time."""
    store = x509.verification.Store(x509.load_pem_x509_certificates(bundle))
    builder = x509.verification.PolicyBuilder().store(store).time(at)
    verifier = builder.build_server_verifier(x509.DNSName(name))
    try:
        verifier.verify(leaf(pair), [])
    except x509.verification.VerificationError:
        return False
    return True


def test_certificates_are_renewed_before_they_expire() -> None:
    made = SelfMade([NEW], "webhook.team.svc")
    seen, now = [], START
    while now < START + 10 * SERVES_FOR:
        pair = made.pair(now)
        assert leaf(pair).not_valid_before_utc < now < leaf(pair).not_valid_after_utc - SERVES_FOR / 2 + timedelta(1)
        seen.append(pair)
        now += timedelta(hours=6)
    assert 10 < len(set(seen)) < 30, "renewed at half of their time, and not at each look"


def test_a_clock_that_was_set_back_gets_a_certificate_that_is_valid_then() -> None:
    made = SelfMade([NEW], "webhook.team.svc")
    first = made.pair(START)
    assert made.pair(START - timedelta(minutes=5)) == first, "others' clocks may be behind"
    earlier = START - timedelta(days=3)
    assert leaf(made.pair(earlier)).not_valid_before_utc < earlier


def test_every_replica_has_the_same_authority() -> None:
    one, other = SelfMade([NEW], "webhook.team.svc"), SelfMade([NEW], "webhook.team.svc")
    assert one.pair(START) != other.pair(START)
    bundle = one.bundle(START)
    assert other.is_current(bundle, START)
    assert trusts(bundle, one.pair(START), START)
    assert trusts(bundle, other.pair(START), START)
    assert not trusts(bundle, other.pair(START), START, name="another.team.svc")
    assert not trusts(bundle, SelfMade([OLD], "webhook.team.svc").pair(START), START)


def test_an_authority_is_renewed_before_it_expires_and_the_old_certificates_stay_valid() -> None:
    made = SelfMade([NEW], "webhook.team.svc")
    bundle = made.bundle(START)
    assert made.is_current(bundle, START + SIGNS_FOR / 2 - timedelta(days=1))
    later = START + SIGNS_FOR / 2 + timedelta(days=1)
    assert not made.is_current(bundle, later)
    renewed = made.bundle(later)
    assert made.is_current(renewed, later)
    assert trusts(renewed, made.pair(later - timedelta(days=1)), later)
    assert not trusts(bundle, made.pair(START + SIGNS_FOR), START + SIGNS_FOR + timedelta(days=1)), "expired"


@pytest.mark.parametrize("bundle", [b"", b"text", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_bundle_that_is_no_bundle_is_replaced(bundle: bytes) -> None:
    assert not SelfMade([NEW], "webhook.team.svc").is_current(bundle, START)


def test_while_the_install_key_changes_replicas_with_the_old_and_the_new_one_are_trusted() -> None:
    before, after = SelfMade([OLD], "webhook.team.svc"), SelfMade([NEW, OLD], "webhook.team.svc")
    bundle = after.bundle(START)
    assert not after.is_current(before.bundle(START), START)
    assert trusts(bundle, before.pair(START), START)
    assert trusts(bundle, after.pair(START), START)


def test_pairs_can_be_served_with_and_do_not_show_their_key(tmp_path: Path) -> None:
    pair = SelfMade([NEW], "127.0.0.1").pair(START)
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    assert Files(tmp_path).pair(START) == pair
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    assert pair.key.decode() not in repr(pair)
    assert "PRIVATE" not in repr(pair)


def test_files_that_are_not_there_yet(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"tls\.crt: No such file"):
        Files(tmp_path).pair(START)
