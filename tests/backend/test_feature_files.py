"""The target's features on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.backend.feature_files import FeatureFiles
from asyncspec.core.feature_log import rows_between
from asyncspec.core.jobs import TensorRows
from asyncspec.core.prefix_keys import prefix_keys
from asyncspec.plugins.toy.source import ToyFeatures
from asyncspec_protocol.limits import PREFIX_UNIT
from effort import examples

TEXT = tuple(i % 97 for i in range(700))
KEYS = prefix_keys(TEXT, (2,))
FEATURES = tuple(i.to_bytes(8, "little") for i in range(len(TEXT)))


def handles(sizes: Sequence[int]) -> tuple[TensorRows, ...]:
    """The features of all tokens in tensors, each of which has a dead row in front."""
    rows: list[TensorRows] = []
    start = 0
    while start < len(TEXT):
        size = sizes[len(rows) % len(sizes)]
        part = FEATURES[start : start + size]
        rows.append(TensorRows((b"\xff" * 8, *part), tuple(range(1, 1 + len(part)))))
        start += size
    return tuple(rows)


def values(rows: Sequence[TensorRows]) -> tuple[bytes, ...]:
    return tuple(some.handle[row] for some in rows for row in some.rows)  # type: ignore[index]


sizes_of_tensors = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@given(sizes_of_tensors, st.integers(0, len(TEXT)), st.integers(0, len(TEXT)))
def test_the_rows_between_positions(sizes: list[int], start: int, end: int) -> None:
    assert values(rows_between(handles(sizes), start, end)) == FEATURES[start:end]


@settings(max_examples=examples(100, quick=20))
@given(
    sizes_of_tensors,
    st.lists(st.integers(1, len(TEXT) // PREFIX_UNIT), min_size=1, max_size=4),
    st.integers(0, len(KEYS)),
)
def test_what_was_written_is_read(sizes: list[int], ends: list[int], wanted: int) -> None:
    """By another process too, and as one tensor; of a shorter text no more than it has."""
    with tempfile.TemporaryDirectory() as folder:
        for units in ends:
            files = FeatureFiles(Path(folder) / "features", 10**6, ToyFeatures())
            end = units * PREFIX_UNIT
            assert files.write(KEYS[:units], 0, end, handles(sizes)) >= end
        files = FeatureFiles(Path(folder) / "features", 10**6, ToyFeatures())
        tokens, rows = files.read(KEYS[:wanted])
        assert tokens <= wanted * PREFIX_UNIT
        assert values(rows) == FEATURES[:tokens]  # type: ignore[arg-type]
        tokens, rows = files.read(KEYS)
        assert tokens == max(ends) * PREFIX_UNIT
        assert len(rows) == 1  # type: ignore[arg-type]


def test_features_without_room_are_not_stored(tmp_path: Path) -> None:
    files = FeatureFiles(tmp_path / "features", 100, ToyFeatures())
    assert files.write(KEYS, 0, 640, handles([64])) == 0
    assert files.read(KEYS) == (0, ())
