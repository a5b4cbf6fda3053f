"""GGUF files as they should not be: one line with the reason, whatever their bytes are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.llama.gguf_file import STRING, Value, header, value
from asyncspec.plugins.llama.target import TOKENS, OpenTarget, open_target, vocabulary
from backend.gguf_vocabularies import control, normal, save_vocabulary

NAME = "m-00001-of-00001.gguf"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> OpenTarget:
    """Of few bytes, so that random ones often matter."""
    path = tmp_path_factory.mktemp("gguf") / NAME
    target = save_vocabulary(path, [*normal("a", "b"), *control("</s>")])
    return changed(target, path, {"split.count": value(2, 1)})


def changed(target: OpenTarget, path: Path, keys: dict[str, Value]) -> OpenTarget:
    """The model with other metadata, and zeros for weights."""
    path.write_bytes(header({**target.model.metadata, **keys}, target.model.tensors) + bytes(64))
    return open_target(path)


EDGES = [b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(7) + b"\x80", bytes(8), b"\xff" * 4, b"\t"]
"""Numbers at the edges of their types, and the type of arrays."""


@given(
    changes=st.lists(
        st.tuples(st.integers(0, 2000), st.sampled_from(EDGES) | st.binary(min_size=1)),
        max_size=4,
    ),
    size=st.integers(0, 2000),
)
def test_a_damaged_file_is_read_or_refused(
    changes: list[tuple[int, bytes]], size: int, small: OpenTarget
) -> None:
    data = bytearray(small.path.read_bytes())
    for place, new in changes:
        start = place % len(data)
        data[start : start + len(new)] = new
    damaged = small.path.parent / "damaged" / NAME
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(data[:size] if size < len(data) else data)
    try:
        opened = open_target(damaged)
        assert opened.info.vocab_size >= 0
        vocabulary(opened.model)
    except CheckpointError as error:
        assert str(damaged.parent) in str(error)  # noqa: PT017


@pytest.mark.parametrize("length", EDGES[:3])
def test_texts_longer_than_their_file(length: bytes, small: OpenTarget, tmp_path: Path) -> None:
    data = bytearray(small.path.read_bytes())
    first = data.index(TOKENS.encode()) + len(TOKENS) + 16  # types of array and texts, their count
    data[first : first + 8] = length
    damaged = tmp_path / NAME
    damaged.write_bytes(data)
    with pytest.raises(CheckpointError, match="is truncated or damaged; fetch it again"):
        open_target(damaged)


@pytest.mark.parametrize("tokens", [value(4, [1, 2, 3]), value(4, 3), value(STRING, "abc")])
def test_vocabularies_that_are_no_texts(tokens: Value, small: OpenTarget, tmp_path: Path) -> None:
    opened = changed(small, tmp_path / NAME, {TOKENS: tokens})
    with pytest.raises(CheckpointError, match=rf"{TOKENS} cannot be .*; fetch it again"):
        _ = opened.info


def test_the_number_of_files_is_that_of_their_names(small: OpenTarget, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is part of a model in 2147483647 files"):
        changed(small, tmp_path / NAME, {"split.count": value(4, 2**31 - 1)})


@pytest.mark.parametrize(
    "keys",
    [
        *({"general.architecture": value(STRING, name)} for name in ("eurobert", "bert", "t5")),
        {"llama.attention.causal": value(7, False)},
    ],
)
def test_encoders_are_refused(keys: dict[str, Value], small: OpenTarget, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a \w+ model does not continue text; use another"):
        changed(small, tmp_path / NAME, keys)
