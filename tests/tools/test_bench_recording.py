"""``python tools/bench --record``: figures of a benchmark become a table of a result file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec.sim.recorded import FORMAT, LanguageHeader, RecordedText
from tools.bench import recording
from tools.bench.__main__ import main
from tools.bench.docs import results
from tools.bench.record_language import write_language

scalars = st.one_of(st.integers(-9, 9), st.floats(-9, 9), st.booleans(), st.none(), st.text())


@given(st.lists(st.dictionaries(st.sampled_from("abc"), scalars, min_size=1), min_size=1))
def test_every_row_has_a_cell_for_every_column(figures: list[dict[str, recording.Scalar]]) -> None:
    columns, rows = recording.tabulated(figures)
    assert [column.name for column in columns] == list(figures[0])
    assert all(len(row) == len(columns) for row in rows)
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        numbers = [v for v in values if not isinstance(v, str)]
        assert (column.decimals is not None) == bool(numbers)


def test_objects_are_tables_too() -> None:
    _, rows = recording.tabulated({"efficiency": 0.9, "notes": ["left out"]})
    assert rows == (("efficiency", 0.9),)
    columns, rows = recording.tabulated({"flowspec": {"rows": 3}, "chain": {"rows": 1}})
    assert [column.name for column in columns] == ["", "rows"]
    assert rows == (("flowspec", 3), ("chain", 1))


@pytest.mark.parametrize("figures", [[], {}, [1, 2], {"notes": []}, 3])
def test_what_is_no_table_is_refused(figures: object) -> None:
    with pytest.raises(UserError):
        recording.tabulated(figures)


@pytest.fixture
def language(tmp_path: Path) -> Path:
    text = RecordedText((1,), (5, 6), ((5, 9), (9, 6)), ((-0.1, -2.0), (-0.1, -2.0)))
    write_language(tmp_path / "language", LanguageHeader(FORMAT, "t", "d", 10), [text])
    return tmp_path / "language"


def test_a_table_names_machine_commit_and_command(
    tmp_path: Path, language: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FOLDER", tmp_path)
    for name in ("first", "second", "first"):
        assert main(["coverage", str(language), "--record", f"sources#{name}"]) == 0
    found = results.load(tmp_path / "sources.json")
    assert list(found.tables) == ["first", "second"]
    table = found.tables["first"]
    assert table.rows == (("1", 0.5), ("2", 1.0))
    assert table.command == f"python tools/bench coverage {language} --record 'sources#first'"
    assert table.machine
    assert table.commit
    assert table.date
    # Cells without a value of their own are not written.
    assert "caption" not in json.loads((tmp_path / "sources.json").read_text())["tables"]["first"]


@pytest.mark.parametrize(
    ("place", "printed", "said"),
    [
        ("sources#t", "", "not one JSON value"),
        ("sources#t", '{"a": 1}\n{"a": 2}\n', "not one JSON value"),
        ("sources#t:b", '{"a": {"x": 1}}', "no key 'b'; there are a"),
        ("sources#t:b", "[1]", "no key 'b'; there are no keys"),
    ],
)
def test_what_cannot_be_recorded_is_a_users_mistake(
    place: str, printed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FOLDER", tmp_path)

    def run() -> int:
        sys.stdout.write(printed)
        return 0

    with pytest.raises(UserError, match=said):
        recording.record(place, [], run)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["sources", "#t", "../sources#t", "sources#"])
def test_a_place_that_is_none_is_a_users_mistake(place: str, language: Path) -> None:
    assert main(["coverage", str(language), "--record", place]) == 2
    assert main(["docs", "--record", "sources#t"]) == 2
