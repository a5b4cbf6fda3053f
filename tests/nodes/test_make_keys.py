"""``make-keys.sh`` as a user runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cryptography import x509

SCRIPT = Path(__file__).parents[2] / "nodes" / "examples" / "make-keys.sh"


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_a_missing_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cluster" / "keys"
    done = make(str(folder), "box")
    assert done.returncode == 0, done.stderr
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in folder.iterdir()} == {"ca.key", "ca.pem", "box.key", "box.pem"}


def test_a_folder_that_exists_keeps_its_mode_and_its_authority(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert make(str(tmp_path), "box").returncode == 0
    authority = (tmp_path / "ca.pem").read_bytes()
    assert make(str(tmp_path), "other").returncode == 0
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert (tmp_path / "other.pem").exists()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_without_a_folder_it_says_how_it_is_used() -> None:
    done = make()
    assert done.returncode == 2
    assert (
        done.stderr
        == "usage: bash make-keys.sh DIRECTORY NAME[=ROLE[,ROLE]]... | --revoke NAME...\n"
    )


def test_a_role_that_there_is_not(tmp_path: Path) -> None:
    done = make(str(tmp_path), "box=king")
    assert done.returncode == 2
    assert "box=king: the role king is none of node, node:RANK, client, operator" in done.stderr
    assert not (tmp_path / "box.pem").exists()


def revoked(folder: Path) -> set[int]:
    """Serial numbers of the list."""
    found = x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())
    return {one.serial_number for one in found}


def test_a_name_that_is_revoked_already_is_no_obstacle(tmp_path: Path) -> None:
    assert make(str(tmp_path), "one", "two").returncode == 0
    serials = {
        x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes()).serial_number
        for name in ("one", "two")
    }
    assert make(str(tmp_path), "--revoke", "one").returncode == 0
    (tmp_path / "crl.pem").unlink()
    done = make(str(tmp_path), "--revoke", "one", "two")
    assert done.returncode == 0, done.stderr
    assert revoked(tmp_path) == serials
    (tmp_path / "crl.pem").unlink()
    assert make(str(tmp_path), "--revoke", "two").returncode == 0
    assert revoked(tmp_path) == serials
    # A new certificate of the name is another one.
    assert make(str(tmp_path), "one").returncode == 0
    assert make(str(tmp_path), "--revoke", "one").returncode == 0
    assert len(revoked(tmp_path)) == 3


def test_a_name_without_a_certificate_is_said(tmp_path: Path) -> None:
    assert make(str(tmp_path), "one").returncode == 0
    done = make(str(tmp_path), "--revoke", "none", "one")
    assert done.returncode == 2
    assert "there is no certificate none.pem" in done.stderr
