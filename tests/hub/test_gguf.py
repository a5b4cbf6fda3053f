"""GGUF models on the Hub: by file, by quantisation, whole and in shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncspec.backend.hub import HubName
from asyncspec.backend.registry import backend_name
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files import hub as hub_files
from asyncspec.plugins.llama.model_file import HubFile, locate, parse, short_name
from hub.fake_hub import FakeHub
from hub.test_hub import Machine, machine

__all__ = ["machine"]
pytestmark = [pytest.mark.processes, pytest.mark.torch]

FILES = (
    "m-Q4_K_M.gguf",
    "m-f16.gguf",
    "m-BF16.gguf",
    "mmproj-m-Q8_0.gguf",
    "Q8_0/m-Q8_0-00001-of-00002.gguf",
    "Q8_0/m-Q8_0-00002-of-00002.gguf",
    "a.Q2_K.gguf",
    "b.Q2_K.gguf",
    "m-Q3_K_XL.gguf",
    "m-UD-Q3_K_XL.gguf",
    "m-UD-IQ1_S.gguf",
    "END-IQ1_M.gguf",
    "mmproj-m-IQ1_M.gguf",
    "README.md",
)


@pytest.fixture
def hub(tmp_path: Path, machine: Machine) -> Iterator[FakeHub]:
    folder = tmp_path / "repository"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    with FakeHub({"org/m-GGUF": folder}) as hub:
        machine.use(hub)
        yield hub


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("org/m-GGUF", {"m-Q4_K_M.gguf"}),
        ("llama:org/m-GGUF@main", {"m-Q4_K_M.gguf"}),
        ("org/m-GGUF:F16", {"m-f16.gguf"}),
        ("org/m-GGUF/m-BF16.gguf", {"m-BF16.gguf"}),
        ("org/m-GGUF:Q3_K_XL", {"m-Q3_K_XL.gguf"}),
        ("org/m-GGUF:UD-Q3_K_XL", {"m-UD-Q3_K_XL.gguf"}),
        ("org/m-GGUF:IQ1_S", {"m-UD-IQ1_S.gguf"}),
        ("org/m-GGUF:IQ1_M", {"END-IQ1_M.gguf", "mmproj-m-IQ1_M.gguf"}),
        ("org/m-GGUF@main/Q8_0/m-Q8_0-00001-of-00002.gguf", set(FILES[4:6])),
    ],
)
def test_what_is_fetched(hub: FakeHub, machine: Machine, name: str, wanted: set[str]) -> None:
    first = locate(name)
    assert first.read_text() == min(wanted)
    assert hub.downloads() == wanted
    machine.use(hub, offline=True)
    assert locate(name) == first


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("org/m-GGUF:Q5_K", "org/m-GGUF with Q5_K has no GGUF models; name the file: org/m-GGUF/"),
        ("org/m-GGUF:Q2_K", "has 2 GGUF models; name the file"),
        ("org/m-GGUF/n.gguf", "org/m-GGUF has no n.gguf; correct the name"),
        ("org/none/n.gguf", "org/none is neither a local"),
        ("./n.gguf", "there is no file n.gguf"),
        ("n.gguf", "there is no file n.gguf"),
        ("folder/n.gguf", "there is no file folder/n.gguf"),
    ],
)
def test_missing_files_are_reported(hub: FakeHub, name: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        locate(name)


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    (tmp_path / "m-00001-of-00002.gguf").touch()
    (tmp_path / "m-00002-of-00002.gguf").touch()
    assert locate(f"llama:{tmp_path}").name == "m-00001-of-00002.gguf"
    (tmp_path / "n.gguf").touch()
    with pytest.raises(CheckpointError, match="has 2 GGUF models"):
        locate(f"llama:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "backend", "revision"),
    [
        ("org/m-GGUF@feature/x", "llama", "feature/x"),
        ("org/m-GGUF@feature/x:Q8_0", "llama", "feature/x"),
        ("org/m-GGUF@main/Q8_0/m.gguf", "llama", "main"),
        ("org/m@feature/x-gguf", "hf", "feature/x-gguf"),
        ("org/m@main/m.gguf", "llama", "main"),
    ],
)
def test_a_branch_may_have_slashes(name: str, backend: str, revision: str) -> None:
    assert backend_name(name) == backend
    if backend == "llama":
        found = parse(name)
        assert isinstance(found, HubFile)
        assert found.repository.revision == revision
    else:
        assert hub_files.parse(name) == HubName("org/m", revision)


def test_a_local_path_has_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m-gguf@2" / "checkpoint").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert backend_name("m-gguf@2/checkpoint") == "hf"
    assert backend_name(str(tmp_path / "m-gguf@2" / "checkpoint")) == "hf"
    assert backend_name("./folder@2/m.gguf") == "llama"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("org/m-GGUF:Q8_0", "m-GGUF"),
        ("org/m-GGUF:UD-Q4_K_XL", "m-GGUF"),
        ("org/m-GGUF/x/m-Q8_0.gguf", "m-Q8_0"),
    ],
)
def test_short_names_of_models(name: str, short: str) -> None:
    assert short_name(name) == short
