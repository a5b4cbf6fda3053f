"""Registries: objects of installed packages, whose metadata alone is made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncspec.core.errors import UserError
from asyncspec.registry import Plugin, Registry, missing_requirements, pip_install

GROUP = "asyncspec.tests"


def install(folder: Path, package: str, entries: str, requires: str = "") -> None:
    """A package's metadata, as pip writes it into ``folder``."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n{requires}"
    )
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")


def registry(expected: type = int) -> Registry[int]:
    return Registry(GROUP, "number", expected)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_objects_of_several_packages_are_found_by_their_names(site: Path) -> None:
    install(site, "first", "maxsize = sys:maxsize")
    install(site, "second", "hexversion = sys:hexversion\nAF_INET = socket:AF_INET")
    import sys

    numbers = registry()
    assert list(numbers) == ["AF_INET", "hexversion", "maxsize"]
    assert numbers["maxsize"] == sys.maxsize
    assert "maxsize" in numbers
    assert "minsize" not in numbers
    assert numbers.plugins()[2] == Plugin("maxsize", "sys:maxsize", "first", "1.0")
    with pytest.raises(KeyError):
        numbers["minsize"]


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("no_such_module_here:X", "cannot be imported: ModuleNotFoundError: No module named"),
        ("sys:no_such_name", "cannot be imported: AttributeError"),
        ("sys:version", "is of type str, not int"),
    ],
)
def test_a_broken_package_is_one_line_with_its_name(site: Path, location: str, says: str) -> None:
    install(site, "broken", f"bad = {location}")
    install(site, "sound", "good = sys:maxsize")
    numbers = registry()
    with pytest.raises(UserError) as error:
        numbers["bad"]
    line = str(error.value)
    assert line.startswith(f"package broken 1.0: number 'bad' ({location}) ")
    assert says in line
    assert line.endswith("update or uninstall broken")
    assert "\n" not in line
    objects, problems = numbers.usable()
    assert list(objects) == ["good"]
    assert problems == [line]
    assert numbers.usable(without={"bad"})[1] == []


def test_what_a_package_says_of_its_own_import_comes_with_its_name(site: Path) -> None:
    says = "from asyncspec.core.errors import UserError\nraise UserError('set MINE_HOME')\n"
    (site / "particular.py").write_text(says)
    install(site, "particular", "bad = particular:X")
    with pytest.raises(
        UserError, match=r"^package particular 1.0: number 'bad' .*: set MINE_HOME$"
    ):
        registry()["bad"]


def test_errors_of_our_own_modules_keep_their_kind(site: Path) -> None:
    (site / "ours.py").write_text("raise RuntimeError('a bug')\n")
    install(site, "asyncspec", "bad = ours:X")
    with pytest.raises(RuntimeError, match="a bug"):
        registry()["bad"]


def test_a_name_of_two_packages_is_an_error_where_it_is_used(site: Path) -> None:
    install(site, "first", "size = sys:maxsize")
    install(site, "second", "size = sys:hexversion\nother = sys:maxsize")
    numbers = registry()
    assert numbers["other"]
    with pytest.raises(UserError, match="number 'size' is brought by first and second; uninstall"):
        numbers["size"]


def test_what_a_missing_extra_would_bring(site: Path) -> None:
    requires = (
        "Requires-Dist: no-such-package-here<2,>=1; extra == 'gpu'\n"
        "Requires-Dist: msgspec; extra == 'gpu'\n"
        "Requires-Dist: another-one; extra == 'cpu'\n"
        "Requires-Dist: of-some-platforms; sys_platform == 'plan9' and extra == 'gpu'\n"
    )
    install(site, "some", "plain = sys:maxsize\nfast = no_such_module:X [gpu]", requires)
    fast, plain = registry().plugins()
    assert missing_requirements(fast) == ["no-such-package-here"]
    assert missing_requirements(plain) == []
    with pytest.raises(UserError) as error:
        registry()["fast"]
    line = str(error.value)
    assert line.startswith("number 'fast' needs no-such-package-here: ")
    assert line.endswith("-m pip install 'some[gpu]'")


def test_the_command_names_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.chdir(tmp_path)
    assert pip_install("asyncspec[hf]") == ".venv/bin/python -m pip install 'asyncspec[hf]'"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert (
        pip_install("x", "--no-deps") == f"{tmp_path}/.venv/bin/python -m pip install --no-deps x"
    )
