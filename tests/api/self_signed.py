"""Certificates as cert-manager's self-signed issuer makes them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
CURVES = {256: ec.SECP256R1}
LIVES_FOR = timedelta(days=90)  # where the Certificate does not say


def issue(spec: Mapping[str, Any], address: str, folder: Path) -> bytes:
    """Write tls.crt and tls.key for the spec of a Certificate and one more address; gives what the Secret has as ca.crt.

    Nobody signs it but itself, it has no subject, and it is no authority.
    """
    assert spec["privateKey"]["algorithm"] == "ECDSA"
    key = ec.generate_private_key(CURVES[spec["privateKey"]["size"]]())
    asked, now, nobody = {one.replace(" ", "_") for one in spec["usages"]}, datetime.now(UTC), x509.Name([])
    assert asked <= {*USAGES, "server_auth"}
    names = [*map(x509.DNSName, spec["dnsNames"]), x509.IPAddress(ipaddress.ip_address(address))]
    made = (
        x509.CertificateBuilder(nobody, nobody, key.public_key(), x509.random_serial_number(), now, now + LIVES_FOR)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{one: one in asked for one in USAGES}), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
    )
    if "server_auth" in asked:
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    certificate = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    (folder / "tls.crt").write_bytes(certificate)
    (folder / "tls.key").write_bytes(private)
    return certificate
