"""Keys, certificates and kubeconfigs of one cluster: one authority for Kubernetes, another one for etcd."""

import base64
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = timedelta(days=365)
# A clock that was set back a little, as after a virtual machine's sleep, must not void what was just made.
BACKDATED = timedelta(hours=1)

Name = str | IPv4Address
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first moment on, replacing an old one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
    draft.replace(path)


@dataclass(frozen=True, slots=True)
class Issued:
    """Where a certificate and its key are."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder: `<name>.crt`, and `<name>.key` with mode 0600."""

    folder: Path
    name: str

    @property
    def certificate(self) -> Path:
        return self.folder / f"{self.name}.crt"

    @property
    def key(self) -> Path:
        return self.folder / f"{self.name}.key"

    def create(self, *, names: Sequence[Name] = (), with_rsa: bool = False) -> None:
        """Make the authority's own key and certificate.

        names: its subject alternative names, for programs that look for one; with_rsa: for those that read no other key.
        """
        key: PrivateKey = rsa.generate_private_key(65537, 2048) if with_rsa else ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"elastipod-local-{self.name}")])
        builder = (
            _builder(subject, subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(n) for n in names]), False)
        _write_pair(Issued(self.certificate, self.key), builder.sign(key, hashes.SHA256()), key)

    def issue(
        self, file_name: str, common_name: str, *, group: str | None = None, serves: Sequence[Name] = ()
    ) -> Issued:
        """Issue a certificate for a client (user `common_name` in `group`) and, with `serves`, for a server.

        serves: addresses and DNS names under which the server is called.
        """
        issuer = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        issuer_key = serialization.load_pem_private_key(self.key.read_bytes(), password=None)
        assert isinstance(issuer_key, PrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
        subject = x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])
        builder = (
            _builder(subject, issuer.subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )
        if serves:
            builder = builder.add_extension(x509.SubjectAlternativeName([_alternative(n) for n in serves]), False)
        issued = Issued(self.folder / f"{file_name}.crt", self.folder / f"{file_name}.key")
        _write_pair(issued, builder.sign(issuer_key, hashes.SHA256()), key)
        return issued


def write_signing_keys(folder: Path) -> Issued:
    """Make the key pair that signs service account tokens: `sa.pub` (in place of a certificate) and `sa.key`."""
    key = ec.generate_private_key(ec.SECP256R1())
    pair = Issued(folder / "sa.pub", folder / "sa.key")
    write_private(pair.key, _private_pem(key))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_private(pair.certificate, public)
    return pair


def write_kubeconfig(path: Path, *, server: str, authority: Authority, client: Issued, cluster: str) -> None:
    """Write a kubeconfig that carries its certificates in itself (mode 0600), so that one file is all one needs."""

    def inline(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    context = f"elastipod-{cluster}"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": context,
                "cluster": {"server": server, "certificate-authority-data": inline(authority.certificate)},
            }
        ],
        "users": [
            {
                "name": context,
                "user": {"client-certificate-data": inline(client.certificate), "client-key-data": inline(client.key)},
            }
        ],
        "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
        "current-context": context,
    }
    write_private(path, json.dumps(content, indent=1).encode() + b"\n")  # JSON is YAML


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + VALID_FOR)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(name: Name) -> x509.GeneralName:
    return x509.IPAddress(name) if isinstance(name, IPv4Address) else x509.DNSName(name)


def _private_pem(key: PrivateKey) -> bytes:
    # RSA keys as the programs expect them that insist on RSA: PKCS #1.
    rsa_format = serialization.PrivateFormat.TraditionalOpenSSL
    form = rsa_format if isinstance(key, rsa.RSAPrivateKey) else serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write_pair(files: Issued, certificate: x509.Certificate, key: PrivateKey) -> None:
    write_private(files.key, _private_pem(key))
    write_private(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
