"""Stored parts of prompts: whatever happens to files, what is read is what was written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.backend.prefix_files import STALE_SECONDS, PrefixFiles
from asyncspec.core.prefix_keys import prefix_keys
from asyncspec_protocol.limits import PREFIX_UNIT
from effort import examples

TEXT = tuple(range(7, 7 + 12 * PREFIX_UNIT))
KEYS = prefix_keys(TEXT)
OTHER = prefix_keys((*TEXT[: 4 * PREFIX_UNIT], *TEXT[::-1]))
MAX_BYTES = 4000


def content(keys: Sequence[bytes], start: int, end: int) -> list[np.ndarray[Any, Any]]:
    """What a stage would have there: of its own for every part."""
    seed = int.from_bytes(keys[end // PREFIX_UNIT - 1][:4], "little") + start
    values = np.random.default_rng(seed).integers(0, 255, (2, end - start, 3), np.uint8)
    return [values, values[:, ::2]]


def check_read(files: PrefixFiles, keys: Sequence[bytes]) -> int:
    """What can be read is a beginning, and all of it is right. Its length."""
    tokens, parts = files.read(keys)
    at = 0
    for start, end, buffers in parts:  # type: ignore[attr-defined]
        assert start == at
        wanted = content(keys, start, end)
        assert [bytes(one) for one in buffers] == [one.tobytes() for one in wanted]
        at = end
    assert at == tokens
    return tokens


def store(files: PrefixFiles, keys: Sequence[bytes], ends: Sequence[int]) -> int:
    """Store a text in parts with these ends, as a stage does."""
    reached = files.write(keys, 0, 0, None)
    for end in (at for at in ends if at > reached):
        stored = files.write(keys, reached, end, content(keys, reached, end))
        if stored <= reached:
            break
        reached = stored
    return reached


damage = st.tuples(
    st.sampled_from(("cut", "flip", "remove", "foreign", "swap")),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)


def hurt(folder: Path, how: str, which: int, where: int) -> None:
    files = sorted(folder.glob("*.kv"))
    if how == "foreign":
        (folder / f"{which:032x}.kv").write_bytes(os.urandom(where % 200))
        (folder / "notes.txt").write_text("mine")
        return
    if not files:
        return
    file = files[which % len(files)]
    data = bytearray(file.read_bytes())
    match how:
        case "cut":
            file.write_bytes(data[: where % len(data)])
        case "flip":
            data[where % len(data)] ^= 1 << which % 8
            file.write_bytes(data)
        case "remove":
            file.unlink()
        case _:
            os.replace(file, files[where % len(files)])


@settings(max_examples=examples(300, quick=40))
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from((KEYS, OTHER)),
                st.sets(st.integers(1, 12), min_size=1).map(sorted),
            ),
            damage,
            st.just("restart"),
        ),
        max_size=12,
    )
)
def test_what_happens_to_files_only_costs_time(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "stage"
        files = PrefixFiles(folder, MAX_BYTES)
        for step in steps:
            match step:
                case "restart":
                    files = PrefixFiles(folder, MAX_BYTES)
                case (str(how), which, where):
                    hurt(folder, how, which, where)
                case _:
                    store(files, step[0], [unit * PREFIX_UNIT for unit in step[1]])
            assert files.nbytes <= MAX_BYTES
            for keys in (KEYS, OTHER):
                check_read(files, keys)
        files = PrefixFiles(folder, MAX_BYTES)
        assert sum(file.stat().st_size for file in folder.iterdir()) == files.nbytes <= MAX_BYTES


def test_what_is_stored_is_there_after_a_restart(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path / "stage", 10**6)
    assert store(files, KEYS, (64, 160)) == 160
    assert store(files, OTHER, (64, 128)) == 128  # of one beginning
    assert len(list((tmp_path / "stage").iterdir())) == 3
    again = PrefixFiles(tmp_path / "stage", 10**6)
    assert (check_read(again, KEYS), check_read(again, OTHER)) == (160, 128)
    assert (again.hits, again.tokens) == (2, 288)
    assert again.nbytes == files.nbytes


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path / "stage", 10**6)
    store(files, KEYS, (64, 128, 192))
    store(files, OTHER, (64, 128, 192))
    for file in (tmp_path / "stage").iterdir():
        os.utime(file, (1000, 1000))
    full = PrefixFiles(tmp_path / "stage", 10**6)
    check_read(full, OTHER)
    less = PrefixFiles(tmp_path / "stage", full.nbytes - 1)
    # The last part of the other text.
    assert (check_read(less, KEYS), check_read(less, OTHER)) == (128, 192)


def test_a_folder_of_another_stage_is_not_read_and_goes_when_it_is_stale(tmp_path: Path) -> None:
    store(PrefixFiles(tmp_path / "one", 10**6), KEYS, (64,))
    assert check_read(PrefixFiles(tmp_path / "two", 10**6), KEYS) == 0
    for file in (tmp_path / "one").iterdir():
        file.rename(tmp_path / "two" / file.name)
    assert check_read(PrefixFiles(tmp_path / "two", 10**6), KEYS) == 0
    long_ago = (tmp_path / "one").stat().st_mtime - 2 * STALE_SECONDS
    os.utime(tmp_path / "one", (long_ago, long_ago))
    PrefixFiles(tmp_path / "two", 10**6)
    assert not (tmp_path / "one").exists()


def test_a_disk_that_takes_nothing_ends_storing(tmp_path: Path) -> None:
    files = PrefixFiles(tmp_path / "stage", 10**6)
    for file in (tmp_path / "stage").iterdir():
        file.unlink()
    (tmp_path / "stage").rmdir()
    assert files.write(KEYS, 0, 64, content(KEYS, 0, 64)) == -1
