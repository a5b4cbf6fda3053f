"""``asyncspec check``: every fault of a cluster file has a line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from asyncspec_nodes.cli.main import main
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.plugins.join import key_folder
from certificates import make_keys

ROOT = Path(__file__).resolve().parents[2]
SOUND = f"""
[target]
path = "{BUNDLED_TARGET}"
[[node]]
rank = 1
host = "127.0.0.1"
port = 7001
"""


def faults(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    file = folder / "cluster.toml"
    file.write_text(text)
    code = main(["check", str(file), "--json"])
    found: list[str] = json.loads(capsys.readouterr().out)["faults"]
    assert code == (2 if found else 0)
    assert main(["check", str(file)]) == code
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"{file}: {fault}" for fault in found]
    assert bool(out) == (not found)
    return found


def test_a_sound_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(SOUND, tmp_path, capsys) == []


def test_all_wrong_keys_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = SOUND.replace("[[node]]", 'quantise = "int4"\n[darft]\n[[node]]\nprot = 3\ndevice = 4')
    assert set(faults(wrong, tmp_path, capsys)) == {
        "unknown key: target.quantise; did you mean quantize?",
        "unknown key: darft; did you mean draft?",
        "unknown key: node[0].prot; did you mean port?",
        "node[0].device: expected str | null, got int",
    }


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("port = 7001", "", "missing key: node[0].port"),
        ("[target]", "[target", "not valid TOML"),
        ("rank = 1", "rank = 2", "no [[node]] table has rank 1"),
        ("127.0.0.1", "no.such.host.invalid", "[security]"),
        ("port = 7001", "port = 7001\nlayers = [0, 99]", "the target has"),
        (str(BUNDLED_TARGET), "/no/such/model", "/no/such/model"),
        ("[[node]]", '[draft]\nsource = "/no/such/draft"\n[[node]]', "/no/such/draft"),
        ("[[node]]", '[draft]\npolicy = "flwo"\n[[node]]', "did you mean flow?"),
        ("[[node]]", 'chat_template = "none.jinja"\n[[node]]', "none.jinja"),
    ],
)
def test_one_fault(
    old: str, new: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = faults(SOUND.replace(old, new, 1), tmp_path, capsys)
    assert problem in found


def test_names_that_do_not_resolve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SOUND.replace("127.0.0.1", "no.such.host.invalid") + "[cluster]\ninsecure = true\n"
    (found,) = faults(text, tmp_path, capsys)
    assert "cannot be resolved here" in found


PORTS = [
    ("http = 8000", "http = 8000", "http of rank 1 and http of rank 2 both take port 8000"),
    ("http = 7002", "", "http of rank 1 and rank 2 both take port 7002"),
    ("", "http = 7002", "rank 2 and http of rank 2 both take port 7002"),
    ("", 'listen = "127.0.0.1:7001"', "rank 1 and rank 2 both take port 7001"),
    ("http = 8000", 'listen = "127.0.0.1:8000"', "http of rank 1 and rank 2 both take port 8000"),
    ('listen = "10.0.0.1:1"', 'listen = "10.0.0.1:1"', "rank 1 and rank 2 both take port 1 of "),
    ("http = 8000", "http = 8001", ""),
    ('listen = "127.0.0.1:7003"', "http = 7001", ""),
    # Of containers on one machine, and machines behind one address.
    *[
        (f'listen = "{one}:7700"\nhttp = 8000', f'listen = "{other}:7700"\nhttp = 8000', "")
        for one, other in [("0.0.0.0", "0.0.0.0"), ("[::]", "[::]"), ("10.0.0.1", "10.0.0.2")]
    ],
]


@pytest.mark.parametrize("second_host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize(("first", "second", "problem"), PORTS)
def test_ports_of_one_machine(
    first: str,
    second: str,
    problem: str,
    second_host: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = SOUND.replace("port = 7001", f"port = 7001\n{first}") + second_node(second_host, second)
    found = faults(text + "[cluster]\ninsecure = true\n", tmp_path, capsys)
    assert len(found) == bool(problem)
    assert all(problem in fault for fault in found)


def second_node(host: str, lines: str) -> str:
    return f'[[node]]\nrank = 2\nhost = "{host}"\nport = 7002\n{lines}\n'


def test_ports_of_several_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HTTP is on loopback, where each machine has its own ports."""
    text = SOUND.replace("port = 7001", "port = 7001\nhttp = 7001", 1)
    text = text.replace("127.0.0.1", "10.0.0.1") + second_node("10.0.0.2", "http = 7001")
    assert faults(text + "[cluster]\ninsecure = true\n", tmp_path, capsys) == []


def test_a_path_of_the_working_directory_is_none_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For nodes that are started elsewhere the name is an id."""
    here = tmp_path / "here"
    shutil.copytree(BUNDLED_TARGET, here / "model")
    monkeypatch.chdir(here)
    text = SOUND.replace(str(BUNDLED_TARGET), "model") + '[draft]\nsource = "ngram"\n'
    (found,) = faults(text, tmp_path, capsys)
    assert found.startswith("model is in the working directory, and not beside the cluster file;")
    assert faults(text, here, capsys) == []


def test_keys_that_peers_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        make_keys(tmp_path / name, "node")
    table = '[security]\nca = "{}/ca.pem"\ncertificate = "a/node.pem"\nkey = "a/node.key"\n'
    assert faults(SOUND + table.format("a"), tmp_path, capsys) == []
    (found,) = faults(SOUND + table.format("b"), tmp_path, capsys)
    assert "[security] certificate" in found
    (found,) = faults(SOUND + table.format("c"), tmp_path, capsys)
    assert "there is no file" in found
    gone = SOUND + table.format("c").replace("a/", "c/")
    lines = [f"{name}: there is no file" for name in ("ca", "certificate", "key")]
    for found, line in zip(faults(gone, tmp_path, capsys), lines, strict=True):
        assert found.startswith(f"[security] {line}")


def test_a_revoked_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_keys(tmp_path, "node", "other")
    key_folder.revoke(tmp_path, ["node"])
    table = '[security]\nca = "ca.pem"\ncrl = "crl.pem"\ncertificate = "{0}.pem"\nkey = "{0}.key"\n'
    assert faults(SOUND + table.format("other"), tmp_path, capsys) == []
    (found,) = faults(SOUND + table.format("node"), tmp_path, capsys)
    assert found.endswith("the other nodes refuse this one: its certificate is revoked")
