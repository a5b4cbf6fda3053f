"""Text files with a byte order mark, and paths with a plus."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

import pytest

from asyncspec.core.errors import UserError
from asyncspec_nodes.client.answers import read_list, read_text
from asyncspec_nodes.cluster.checkpoints import parts, read_template
from asyncspec_nodes.cluster.toml_file import load


def test_a_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(BOM_UTF8 + b"a = 1")
    assert load(file, "the file", str) == "a = 1"
    assert read_text(file) == "a = 1"
    assert read_template(str(file)) == "a = 1"
    file.write_bytes(BOM_UTF8 + b'{"prompt": "Once"}\n')
    assert [prompt.turns for prompt in read_list(file)] == [("Once",)]


def test_a_plus_within_a_path_joins_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c++models" / "a"
    path.mkdir(parents=True)
    assert parts(str(path)) == (str(path),)
    assert parts(f"{path}+ngram") == (str(path), "ngram")
    assert parts(f"ngram+eagle:{path}+suffix") == ("ngram", f"eagle:{path}", "suffix")
    assert parts("ngram+suffix") == ("ngram", "suffix")


@pytest.mark.parametrize("name", ["a++b", "+ngram", "ngram+"])
def test_a_plus_beside_nothing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="mixes 'nothing'"):
        parts(name)
