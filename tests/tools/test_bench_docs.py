"""The generated parts of the documentation are what their generators make now."""

from __future__ import annotations

import json
import re
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.plugins.viewer.analysis.timeline import Span
from tools.bench.docs import (
    blocks,
    cli,
    cluster_file,
    command,
    comments,
    errors,
    lanes,
    policies,
    results,
)

END = blocks.END


@pytest.mark.slow
def test_generated_pages_are_up_to_date() -> None:
    names = ", ".join(map(str, command.pages()))
    assert not names, f"run `python tools/bench docs` and commit the change of {names}"


def test_a_page_is_filled_once_and_stays() -> None:
    page = f"before\n<!-- generated: echo a b -->\nold\n{END}\nafter\n"
    filled = blocks.fill(page, {"echo": lambda argument: f"[{argument}]"})
    assert filled == f"before\n<!-- generated: echo a b -->\n\n[a b]\n\n{END}\nafter\n"
    assert blocks.fill(filled, {"echo": lambda argument: f"[{argument}]"}) == filled


@pytest.mark.parametrize(
    "page", ["<!-- generated: echo -->\nno end\n", f"{END}\n", f"<!-- generated: x -->\n{END}\n"]
)
def test_a_block_that_cannot_be_filled_is_an_error(page: str) -> None:
    with pytest.raises(UserError):
        blocks.fill(page, {"echo": str})


def write(folder: Path, **changes: Any) -> None:
    """A result file with one table."""
    table = {
        "columns": [{"name": "n"}, {"name": "tokens/s", "decimals": 1, "right": True}],
        "rows": [["one", 1234.56]],
        **changes,
    }
    made = {"machine": "a box", "commit": "abc", "command": "python x", "date": "2026-01-02"}
    (folder / "some.json").write_text(json.dumps({**made, "tables": {"t": table}}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of results."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    return tmp_path


def test_a_table_names_where_it_was_measured(folder: Path) -> None:
    write(folder, machine="another box")
    lines = results.reference("some#t").splitlines()
    assert lines[:3] == ["| n | tokens/s |", "| --- | ---: |", "| one | 1,234.6 |"]
    assert lines[-1] == "`python x`; machine: another box; commit: abc; recorded 2026-01-02."


def test_a_damaged_result_is_one_line(folder: Path) -> None:
    with pytest.raises(UserError):
        results.reference("some#t")
    write(folder, rows=[["one"]])
    with pytest.raises(UserError, match="a row of t has 1 cells"):
        results.reference("some#t")
    write(folder, columns=[{"name": "n"}, {"name": "rate"}], rows=[["one", 0.5]])
    with pytest.raises(UserError, match=r"t has 0\.5 in a column without decimals"):
        results.reference("some#t")
    write(folder)
    with pytest.raises(UserError, match="no table 'u'"):
        results.reference("some#u")


def test_every_result_file_is_shown() -> None:
    pages = "".join(
        path.read_text(encoding="utf-8") for path in results.FOLDER.parent.rglob("*.md")
    )
    for path in sorted(results.FOLDER.glob("*.json")):
        for name in results.load(path).tables:
            assert f"<!-- generated: results {path.stem}#{name} -->" in pages


def test_every_key_option_and_parameter_is_listed() -> None:
    keys = cluster_file.reference("")
    for name in Config.__struct_fields__:
        assert f"[{name}" in keys
    found = policies.reference("")
    for name in POLICIES:
        assert f"`{name}`" in found


LISTED = re.compile(r"^- `([^`]+)`", re.MULTILINE)
SHARED = re.compile(r"^(`.*`):\n\n((?:- .*\n)+)", re.MULTILINE)


def test_every_command_and_option_is_on_its_page() -> None:
    page = (command.ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    shared = SHARED.findall(sections["Shared options"])
    for name, parser in cli.parsers().items():
        own = [lines for names, lines in shared if f"`{name.removeprefix('asyncspec ')}`" in names]
        entries = LISTED.findall("".join([sections[f"`{name}`"], *own]))
        written = {word for entry in entries for word in re.findall(r"--?\w[\w-]*", entry)}
        shown = {o for o, a in parser._option_string_actions.items() if a.help != SUPPRESS}
        assert shown - {"-h", "--help"} <= written, name


def test_names_of_pages_become_links() -> None:
    assert comments.linked("docs/reference/cluster-file.md") == "[cluster file](cluster-file.md)"
    assert comments.linked("docs/plugins/dip-sd.md") == "[dip sd](../plugins/dip-sd.md)"
    assert comments.linked("(docs/guide/install.md)") == "([install](../guide/install.md))"


MESSAGES = """
class ApiError(Exception): ...
def check(name, most):
    if not name:
        raise UserError("give a name")
    text = f"{name} is too long"
    if most:
        text = "shorten it, " + name
        raise ApiError(400, text)
    return Refusal(f"{name} is " + ("bad" if most else "worse"), "invalid")
def name_problem(name):
    if name:
        return None
    return f"{name} is no name"
def other(name):
    raise ValueError("for nobody to see")
"""


def test_messages_are_found_where_they_are_raised_returned_or_sent(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(MESSAGES)
    assert set(errors._raised(tmp_path / "some.py")) == {
        *("give a name", "… is too long", "shorten it, …"),
        *("… is bad", "… is worse", "… is no name"),
    }


def test_every_message_is_explained() -> None:
    page = (command.ROOT / command.MESSAGES).read_text(encoding="utf-8")
    assert errors.NEW not in page, "move new messages to where a paragraph explains them"
    for before in page.split("```text\n")[:-1]:
        paragraph = before.rstrip().rsplit("\n\n", 1)[-1]
        assert paragraph[0] not in "#", paragraph
        assert not paragraph.endswith("```"), paragraph
        assert len(paragraph.split()) > 4, paragraph


def test_reworded_messages_keep_their_place() -> None:
    page = (
        "A.\n\n```text\nthe file … is gone\nnobody says this\n```\n\nB.\n\n```text\nkept …\n```\n"
    )
    raised = ["the file … has gone away", "kept …", "wholly new words"]
    assert errors.refresh(page, raised) == (
        "A.\n\n```text\nthe file … has gone away\n```\n\nB.\n\n```text\nkept …\n```\n"
        f"\n{errors.NEW}\n\n```text\nwholly new words\n```\n"
    )


@given(st.lists(st.text("abc …", min_size=3).map(str.strip).filter(bool), unique=True))
def test_a_refreshed_page_has_every_message_once(raised: list[str]) -> None:
    page = errors.refresh("```text\nabc …\n```\n", raised)
    assert sorted(page.splitlines()).count("```text") <= 2
    lines = [line for line in page.splitlines() if line and "```" not in line]
    assert sorted(line for line in lines if line != errors.NEW) == sorted(raised)
    assert errors.refresh(page, raised) == page


def test_a_lane_marks_the_turns_in_which_a_device_was_busy() -> None:
    spans = [Span(1, "compute", 10.0, 11.0), Span(1, "compute", 12.75, 14.25)]
    assert lanes.lane(spans, 10.0, "#", 0.5).startswith("#..#..")
    assert lanes.lane(spans, 10.0, "D", 0.0).startswith("D.DDD.")
