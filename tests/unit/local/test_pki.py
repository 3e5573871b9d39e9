"""Certificates: who signed them, what they are for, and that keys stay private."""

from __future__ import annotations

import base64
import json
import stat
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elastipod_local.pki import Authority, write_kubeconfig, write_private, write_signing_keys


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path, "ca")
    made.create()
    return made


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def usages(certificate: x509.Certificate) -> set[x509.ObjectIdentifier]:
    return set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_a_client_is_signed_by_the_authority_and_serves_nobody(authority: Authority) -> None:
    issued = authority.issue("node", "system:node:node-1", group="system:nodes")
    certificate = load(issued.certificate)
    certificate.verify_directly_issued_by(load(authority.certificate))
    names = {attribute.oid: attribute.value for attribute in certificate.subject}
    assert names == {NameOID.ORGANIZATION_NAME: "system:nodes", NameOID.COMMON_NAME: "system:node:node-1"}
    assert usages(certificate) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_a_server_is_known_by_all_its_names(authority: Authority) -> None:
    address = IPv4Address("198.18.0.1")
    certificate = load(authority.issue("api", "api", serves=[address, "kubernetes"]).certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [address]
    assert names.get_values_for_type(x509.DNSName) == ["kubernetes"]
    assert ExtendedKeyUsageOID.SERVER_AUTH in usages(certificate)


def test_only_the_authority_may_sign(authority: Authority) -> None:
    leaf = load(authority.issue("leaf", "leaf").certificate)
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    root = load(authority.certificate)
    assert root.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_an_authority_can_have_a_name_and_an_rsa_key(tmp_path: Path) -> None:
    made = Authority(tmp_path, "named")
    made.create(names=["kueue-ca"], with_rsa=True)
    names = load(made.certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["kueue-ca"]
    assert made.key.read_bytes().startswith(b"-----BEGIN RSA PRIVATE KEY-----")  # PKCS #1
    leaf = load(made.issue("leaf", "leaf", serves=["localhost"]).certificate)
    leaf.verify_directly_issued_by(load(made.certificate))


def test_every_file_is_private(authority: Authority, tmp_path: Path) -> None:
    authority.issue("leaf", "leaf")
    write_signing_keys(tmp_path)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_a_private_file_replaces_an_open_one(tmp_path: Path) -> None:
    target = tmp_path / "secret"
    target.write_text("old")
    target.chmod(0o644)
    write_private(target, b"new")
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_kubeconfig_carries_all_it_needs(authority: Authority, tmp_path: Path) -> None:
    client = authority.issue("admin", "admin", group="system:masters")
    path = tmp_path / "kubeconfig"
    write_kubeconfig(path, server="https://198.18.0.1:6443", authority=authority, client=client, cluster="x")
    config = json.loads(path.read_text())
    assert config["current-context"] == "elastipod-x"
    user = config["users"][0]["user"]
    assert base64.b64decode(user["client-key-data"]) == client.key.read_bytes()
    assert base64.b64decode(user["client-certificate-data"]) == client.certificate.read_bytes()
