"""README.md and docs/: links lead somewhere, commands exist, and the pages stay short."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from asyncspec_protocol import messages
from tools.bench.docs import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / folder / "README.md" for folder in ("nodes", "protocol", "asyncspec/models")),
    ]
)
GENERATED = re.compile(r"<!-- generated: .*?<!-- end of generated text -->", re.DOTALL)
MANUAL = ("guide", "reference", "architecture")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    """The text without code blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} does not exist"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


def commands(text: str) -> Iterator[list[str]]:
    """The commands of this project in code blocks and code spans, as lists of words."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^    (\S.*)$", text, re.M)
    lines += re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        if re.match(r"(asyncspec|asyncspec-node|python tools/\w+)( |$)", line.strip()):
            yield shlex.split(line, comments=True)


@by_page
def test_commands_have_their_options(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        end = words.index("--") if "--" in words else len(words)
        check(words[:end])
        if words[end + 1 : end + 2] and words[end + 1].startswith("--"):
            check(["asyncspec", "run", *words[end + 1 :]])


def check(words: list[str]) -> None:
    """A command and its options exist."""
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    if words[0] == "python":
        known = tool_options(Path(words[1]).name, words[2] if len(words) > 2 else "")
    else:
        count = 3 if words[1:2] == ["plan"] else 2
        known = program_options(" ".join(words[: 1 if words[0] == "asyncspec-node" else count]))
    options = {option for option in options if option.replace("--no-", "--", 1) not in known}
    assert options <= known | {"--help"}, f"{' '.join(words)}: {options - known}"


parsers = cache(cli.parsers)


def program_options(name: str) -> set[str]:
    """The options of a command that is installed; none of ``asyncspec`` alone."""
    if name in ("asyncspec", "asyncspec COMMAND"):
        return set()
    assert name in parsers(), f"there is no command {name}"
    return set(parsers()[name]._option_string_actions)


def tool_options(tool: str, kind: str) -> set[str]:
    """All options that a tool's sources name. A kind of benchmark has to exist."""
    folder = ROOT / "tools" / tool
    assert folder.is_dir(), f"there is no tools/{tool}"
    if tool == "bench" and kind.islower():
        source = (folder / "__main__.py").read_text(encoding="utf-8")
        assert f'"{kind}": (' in source, f"there is no benchmark {kind}"
    return program_options("asyncspec trace") if tool == "trace" else named_options(folder)


@cache
def named_options(folder: Path) -> set[str]:
    """The options that the sources in a folder name."""
    return {
        node.value
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"--[a-z-]+", node.value)
    }


def test_checks_find_what_is_wrong() -> None:
    for wrong in (
        "asyncspec run --promt x",
        "asyncspec walk",
        "python tools/bench limit --json",
        "python tools/bench limits --jason",
        "python tools/benches",
    ):
        with pytest.raises(AssertionError):
            check(wrong.split())


@by_page
def test_fields_of_messages_are_named_as_they_are(page: Path) -> None:
    if page.name == "notebook.md":
        return  # it tells of the past
    for name, field in re.findall(r"`([A-Z]\w+)\.(\w+)`", page.read_text(encoding="utf-8")):
        if struct := getattr(messages, name, None):
            assert field in struct.__struct_fields__, f"{name} has no field {field}"


def test_the_readme_fits_on_three_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_manual_stays_short() -> None:
    """Without the generated parts, which are as long as there are options and metrics."""
    pages = [page for part in MANUAL for page in (ROOT / "docs" / part).rglob("*.md")]
    written = [GENERATED.sub("", page.read_text(encoding="utf-8")) for page in pages]
    assert sum(len(text.split()) for text in written) < 15_000


def test_the_ways_through_the_code_are_short_and_exist() -> None:
    text = (ROOT / "docs/architecture/the-life-of-a-segment.md").read_text(encoding="utf-8")
    ways = re.findall(r"^\| from .*$", text, re.M)
    for way, most in zip(ways, (14, 16, 12), strict=True):
        files = re.findall(r"`([^`]+\.py)`", way)
        assert 0 < len(files) <= most
        assert [file for file in files if not (ROOT / file).is_file()] == []


def test_make_has_the_targets_that_pages_name() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S))
        for target in re.findall(r"`make ([a-z]+)\b", text) + re.findall(
            r"^make ([a-z]+)\b", blocks, re.M
        ):
            assert f"\n{target}:" in makefile, f"{page.name}: make {target}"
