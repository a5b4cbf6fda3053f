"""What README and docs say of the files, checked without running anything."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("asyncspec", "protocol/asyncspec_protocol", "nodes/asyncspec_nodes")


def test_the_tree_lists_every_module_with_a_line() -> None:
    tree = (ROOT / "docs/tree.md").read_text().split("```")[1]
    lines = [line.split(maxsplit=1) for line in tree.splitlines() if line.strip()]
    listed = sorted(words[0] for words in lines if words[0].endswith(".py"))
    modules = sorted(
        file.name
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if file.name != "__init__.py"
    )
    assert listed == modules
    assert all(len(words) == 2 for words in lines)


def test_the_readme_lists_every_package() -> None:
    tree = (ROOT / "README.md").read_text().split("<!-- tree -->")[1].split("```")[1]
    listed = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    folders = {
        str(file.parent.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    }
    assert folders - {"nodes/asyncspec_nodes"} <= listed


def test_the_commands_it_names_are_there() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert f"\n{target}:" in makefile
