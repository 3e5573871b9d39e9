"""The webhook's certificates: made by the operator itself, or read from files that cert-manager renews."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVES_FOR = timedelta(days=7)
SIGNS_FOR = timedelta(days=366)
# The API server's clock may be behind.
BACKDATED = timedelta(hours=1)
CURVE = ec.SECP256R1()
CURVE_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class CertificateError(Exception):
    """There is no certificate to serve with; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate, or a chain that begins with it, and its key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


class Certificates(Protocol):
    """Where the webhook's certificate comes from."""

    def pair(self, now: datetime) -> Pair:
        """Give the pair to serve with at this time. Raises CertificateError."""
        ...


class Files:
    """Certificates in a folder, as of a Secret of type kubernetes.io/tls; another program renews them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pair(self, now: datetime) -> Pair:
        """Give what the files contain now."""
        try:
            return Pair((self._folder / "tls.crt").read_bytes(), (self._folder / "tls.key").read_bytes())
        except OSError as error:
            raise CertificateError(
                f"the webhook's certificate cannot be read: {error.filename}: {error.strerror}"
            ) from error


class SelfMade:
    """Certificates of an authority whose key is derived from the install key.

    So every replica has the same authority without sharing a Secret for it, and each issues its own certificates.
    install_keys: the install key, then earlier ones, which other replicas may still use. name: the host of the webhook's URL.
    """

    def __init__(self, install_keys: Iterable[bytes], name: str) -> None:
        self._authorities = [_Authority(key) for key in install_keys]
        self._name = name
        self._issued: tuple[datetime, Pair] | None = None

    def pair(self, now: datetime) -> Pair:
        """Give a pair that is valid for at least half of SERVES_FOR from now on."""
        if self._issued is None or not self._issued[0] - BACKDATED <= now < self._issued[0] + SERVES_FOR / 2:
            self._issued = now, self._authorities[0].issue(self._name, now)
        return self._issued[1]

    def bundle(self, now: datetime) -> bytes:
        """Give the certificates of all authorities as PEM, for the API server."""
        return b"".join(_pem(authority.certificate(now)) for authority in self._authorities)

    def is_current(self, bundle: bytes, now: datetime) -> bool:
        """Whether a bundle has a certificate of each authority that is valid for at least half of SIGNS_FOR from now on."""
        try:
            found = x509.load_pem_x509_certificates(bundle)
        except ValueError:
            return False
        fresh = [c for c in found if c.not_valid_before_utc <= now < c.not_valid_after_utc - SIGNS_FOR / 2]
        return all(any(one.public_key() == authority.public_key for one in fresh) for authority in self._authorities)


class _Authority:
    """A certificate authority. Its key is always the same for an install key, so a renewed certificate replaces the old one."""

    def __init__(self, install_key: bytes) -> None:
        secret = hmac.new(install_key, b"elastipod-webhook-authority", hashlib.sha512).digest()
        self._key = ec.derive_private_key(int.from_bytes(secret, "big") % (CURVE_ORDER - 1) + 1, CURVE)
        self.public_key = self._key.public_key()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elastipod-webhook-authority")])

    def certificate(self, now: datetime) -> x509.Certificate:
        """Give a certificate of this authority, signed by itself."""
        return (
            self._builder(self._name, self.public_key, now, SIGNS_FOR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(is_authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.public_key), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str, now: datetime) -> Pair:
        """Give a pair for a server, with a key of its own."""
        key = ec.generate_private_key(CURVE)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "elastipod-webhook")])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.public_key)
        certificate = (
            self._builder(subject, key.public_key(), now, SERVES_FOR)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_alternative(name)]), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(_pem(certificate), private)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, valid_for: timedelta
    ) -> x509.CertificateBuilder:
        return x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - BACKDATED,
            not_valid_after=now + valid_for,
        )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
