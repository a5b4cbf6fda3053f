"""``asyncspec keys``: the files that it makes, and what it refuses."""

from __future__ import annotations

import contextlib
import shutil
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256

import commands
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import Keys
from asyncspec_nodes.console.arguments import Parser


def make(folder: Path, *words: str) -> None:
    assert cli.main(["keys", str(folder), *words]) == 0


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    """The line that refuses; nothing is written."""
    files = sorted(folder.glob("*"))
    line = commands.usage_error(capsys, "keys", str(folder), *words)
    assert sorted(folder.glob("*")) == files
    return line


def test_a_missing_folder_is_made_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    make(folder, "box=node:1,client")
    assert folder.stat().st_mode & 0o777 == 0o700
    files = list(folder.iterdir())
    assert {path.name for path in files} == {"ca.key", "ca.pem", "box.key", "box.pem"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}/box.pem and .key: node:1, client"
    assert "ca.key makes members: keep it off the machines" in lines[1]


def test_a_certificate_says_what_its_holder_may_be(tmp_path: Path) -> None:
    make(tmp_path, "box=node:1,client", "any")
    for name, roles in (("box", ["node:1", "client"]), ("any", ["node"])):
        issued = certificate(tmp_path, name)
        names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = names.get_values_for_type(x509.UniformResourceIdentifier)
        assert found == [f"urn:asyncspec:{role}" for role in roles]
        issued.verify_directly_issued_by(certificate(tmp_path, "ca"))
        key = serialization.load_pem_private_key((tmp_path / f"{name}.key").read_bytes(), None)
        assert key.public_key() == issued.public_key()


def test_strict_verification_finds_no_fault(tmp_path: Path) -> None:
    """As of Python 3.13's default context: it wants identifiers of keys, besides what we check."""
    make(tmp_path, "box", "guest=client")
    sides = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context, name in zip(sides, ("box", "guest"), strict=True):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        context.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
        context.load_verify_locations(tmp_path / "ca.pem")
    server, client = handshake(*sides)
    assert server["subject"] == ((("commonName", "guest"),),)
    assert client["subject"] == ((("commonName", "box"),),)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> list[ssl._PeerCertRetDictType]:
    """What each side sees of the other."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [server.wrap_bio(there, here, server_side=True), client.wrap_bio(here, there)]
    for _ in range(4):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    found = [side.getpeercert() for side in sides]
    return [one for one in found if one is not None]


def test_a_folder_that_exists_keeps_its_mode_and_its_authority(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make(tmp_path, "box")
    authority = (tmp_path / "ca.pem").read_bytes()
    make(tmp_path, "other")
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert (tmp_path / "other.pem").exists()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_an_authority_with_another_kind_of_key(tmp_path: Path) -> None:
    make(tmp_path)
    key, sample = generate_private_key(65537, 2048), certificate(tmp_path, "ca")
    builder = x509.CertificateBuilder(
        *(sample.issuer, sample.subject, key.public_key(), sample.serial_number),
        *(sample.not_valid_before_utc, sample.not_valid_after_utc),
        [x509.Extension(x509.BasicConstraints.oid, True, x509.BasicConstraints(True, None))],
    )
    pem = serialization.Encoding.PEM
    how = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "ca.pem").write_bytes(builder.sign(key, SHA256()).public_bytes(pem))
    (tmp_path / "ca.key").write_bytes(key.private_bytes(pem, *how))
    make(tmp_path, "box", "other")
    make(tmp_path, "--revoke", "other")
    names = ("ca.pem", "box.pem", "box.key", "crl.pem")
    Keys(SecurityTable(*(str(tmp_path / name) for name in names)))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("box=king",), "box=king: the role king is none of node, node:RANK, client, operator"),
        (("good", "box=node:x"), "the role node:x is none of"),
        (("box=",), "box=: the role '' is none of"),
        (("ca",), "ca: ca.pem is the authority's"),
        (("crl",), "crl: crl.pem is the revocation list's"),
        (("../box",), "../box: the name must be one of a file"),
        (("",), "is empty; give a value"),
        (("x" * 65,), "the name has 65 bytes; at most 64"),
        (("box=node:1", "box=client"), "box is named twice; give its roles at once: box=ROLE,ROLE"),
        (("box", "--revoke", "other"), "keys are made and revoked by two commands"),
        (("--revoke", "none"), "none: there is no certificate"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in refusal(capsys, tmp_path / "new", *words)
    assert not (tmp_path / "new").exists()


def test_authorities_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", "box")
    capsys.readouterr()
    (tmp_path / "a" / "ca.key").rename(tmp_path / "a.key")
    assert "there is no ca.key" in refusal(capsys, tmp_path / "a", "box")
    shutil.copy(tmp_path / "b" / "ca.key", tmp_path / "a")
    assert "they do not belong together" in refusal(capsys, tmp_path / "a", "box")
    (tmp_path / "a" / "ca.key").write_text("a key")
    assert "ca.key and ca.pem are no authority: " in refusal(capsys, tmp_path / "a", "box")
    (tmp_path / "b" / "revoked.txt").write_text("R\tx\n")
    line = refusal(capsys, tmp_path / "b", "--revoke", "box")
    assert line.endswith("revoked.txt: line 1 is no revocation\n")


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write the keys in" in refusal(capsys, tmp_path / "file", "box")


def revoked(folder: Path) -> set[int]:
    """Serial numbers of the list."""
    found = x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())
    return {one.serial_number for one in found}


def test_a_name_that_is_revoked_already_is_no_obstacle(tmp_path: Path) -> None:
    make(tmp_path, "one", "two")
    serials = {certificate(tmp_path, name).serial_number for name in ("one", "two")}
    make(tmp_path, "--revoke")
    assert revoked(tmp_path) == set()
    make(tmp_path, "--revoke", "one")
    (tmp_path / "crl.pem").unlink()
    make(tmp_path, "--revoke", "one", "two")
    assert revoked(tmp_path) == serials
    (tmp_path / "crl.pem").unlink()
    make(tmp_path, "--revoke", "two")
    assert revoked(tmp_path) == serials
    # A new certificate of the name is another one.
    make(tmp_path, "one")
    make(tmp_path, "--revoke", "one")
    assert len(revoked(tmp_path)) == 3


def test_the_list_of_revocations_is_that_of_openssl(tmp_path: Path) -> None:
    """Folders that ``openssl ca`` has kept go on, with reasons and with what it issued."""
    lines = [
        "R\t361126080412Z\t261129080412Z,keyCompromise\t0C46\tunknown\t/CN=box",
        "V\t361126080412Z\t\t0D\tunknown\t/CN=other",
    ]
    (tmp_path / "revoked.txt").write_text("\n".join(lines) + "\n")
    make(tmp_path, "one")
    make(tmp_path, "--revoke", "one")
    assert revoked(tmp_path) == {0xC46, certificate(tmp_path, "one").serial_number}
    kept = (tmp_path / "revoked.txt").read_text().splitlines()
    assert kept[:2] == lines
    assert kept[2].startswith("R\t")
    assert kept[2].endswith("\tunknown\t/CN=one")


def test_one_option_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, "one", "two")
    monkeypatch.setattr(Parser, "environment", {"ASYNCSPEC_REVOKE": "one,two"})
    make(tmp_path)
    assert len(revoked(tmp_path)) == 2
    assert capsys.readouterr().out.endswith("crl.pem: 2 revoked in all\n")
