"""``asyncspec train-head``: what it reads, and the whole way to a head that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncspec.backend.feature_shards import Notes, Shards
from asyncspec.core.errors import UserError
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET, check_draft
from asyncspec_nodes.plugins.train_head.prompts import Item, read_items
from commands import usage_error


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_prompts_of_all_kinds_are_read_once(tmp_path: Path) -> None:
    user = {"role": "user", "content": "hello"}
    file = lines(
        tmp_path / "some.jsonl",
        {"prompt": "hello"},
        {"turns": ["hello", "and then?"]},
        {"messages": [{"role": "system", "content": "Be kind."}, user, {"role": "assistant"}]},
        {"text": "Once upon a time"},
        {"prompt": "hello", "category": "ignored"},
    )
    plain = tmp_path / "book.txt"
    plain.write_text("x" * 4500)
    assert read_items([file]) == (
        Item(messages=(user,)),
        Item(messages=({"role": "system", "content": "Be kind."}, user)),
        Item(text="Once upon a time"),
    )
    assert [len(item.text) for item in read_items([plain])] == [2000, 500]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "?"}, 'line 1 of .* has none of "prompt"'),
        ({"prompt": 3}, "line 1 of .* is no prompt"),
        ({"messages": [{"role": "system", "content": ""}]}, 'no message of the role "user"'),
    ],
)
def test_what_is_no_prompt_is_one_line(tmp_path: Path, row: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_items([lines(tmp_path / "a.jsonl", row)])


@pytest.mark.torch
def test_from_prompts_to_a_head_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data = lines(tmp_path / "p.jsonl", *({"prompt": f"A tale of {x}"} for x in ("cats", "dogs")))
    out = tmp_path / "head"
    words = ["train-head", "--target", str(BUNDLED_TARGET), "--data", str(data), "--out", str(out)]
    words += ["--max-new-tokens", "8", "--epochs", "0.1", "--device", "cpu"]
    assert cli.main(words) == 0
    assert f"--draft eagle:{out}" in capsys.readouterr().out
    check_draft(f"eagle:{out}", str(BUNDLED_TARGET))
    notes = json.loads((out / "training" / "eagle3" / "shards.json").read_text())
    shards = Shards(out / "training" / "eagle3", Notes(**{**notes, "depths": (2, 4, 5)}))
    assert sorted(text.number for _, text in shards.texts()) == [0, 1, 2, 3]
    # Once more: nothing is collected, and the training is over.
    assert cli.main(words) == 0
    assert len([*shards.texts()]) == 4


@pytest.mark.torch
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: Any) -> str:
        given = ("train-head", "--target", str(BUNDLED_TARGET), "--out", tmp_path, *words)
        return usage_error(capsys, *map(str, given))

    assert "--disk-gib is 0; it must be above 0" in said("--disk-gib", 0)
    assert "nothing to read" in said("--data", lines(tmp_path / "none.jsonl"))
