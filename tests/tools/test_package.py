"""Wheel and sdist: what an index demands of them, and what users need of them."""

from __future__ import annotations

import re
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling import build
from packaging.metadata import Metadata
from trove_classifiers import classifiers

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("asyncspec", "protocol/asyncspec_protocol", "nodes/asyncspec_nodes")


def built(how: Callable[[str], str], folder: Path) -> Path:
    """A distribution of this checkout, in ``folder``."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(ROOT)
        return folder / how(str(folder))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(built(build.build_wheel, tmp_path_factory.mktemp("wheel")))


def metadata(wheel: zipfile.ZipFile) -> Metadata:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Metadata.from_email(wheel.read(name), validate=True)


def test_metadata_are_those_an_index_takes(wheel: zipfile.ZipFile) -> None:
    found = metadata(wheel)
    assert 0 < len(found.summary or "") <= 512
    assert found.description_content_type == "text/markdown"
    assert (found.description or "").startswith("# asyncspec")
    assert set(found.classifiers or ()) <= classifiers
    assert found.license_expression == "Apache-2.0"
    names = {name.rpartition("licenses/")[2] for name in wheel.namelist() if "licenses/" in name}
    assert names == set(found.license_files or ()) == {"LICENSE", "asyncspec/models/NOTICE"}


def test_every_classified_python_is_allowed(wheel: zipfile.ZipFile) -> None:
    found = metadata(wheel)
    versions = [
        one.rpartition(" ")[2] for one in found.classifiers or () if re.search(r":: 3\.\d+$", one)
    ]
    assert versions
    assert found.requires_python is not None
    assert all(found.requires_python.contains(version) for version in versions)


def test_every_requirement_has_both_bounds() -> None:
    """The next major version of what it needs may break an installed release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["hf"]:
        assert re.match(r"[\w-]+>=[\d.]+,<[\d.]+(;|$)", line), line


def test_a_wheel_has_models_pages_and_every_module(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for folder in FOLDERS:
        top = (ROOT / folder).parent
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        expected = {str(p.relative_to(top)) for p in files if "__pycache__" not in p.parts}
        assert expected <= names
    assert any(name.startswith(f"asyncspec/models/{BUNDLED_TARGET.name}/") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        Path(folder).name for folder in FOLDERS
    }


def test_an_sdist_builds_a_wheel_by_itself(tmp_path: Path, wheel: zipfile.ZipFile) -> None:
    with tarfile.open(built(build.build_sdist, tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    for name in wheel.namelist():
        if ".dist-info" not in name:
            assert any(found.endswith(name) for found in names), name
