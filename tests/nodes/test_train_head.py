"""``asyncspec train-head``: what it reads, and the whole way to a head that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncspec.backend.feature_shards import Notes, Shards, read_notes
from asyncspec.core.errors import UserError
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.checkpoints import BUNDLED_EAGLE, BUNDLED_TARGET, check_draft
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.plugins.train_head.prompts import Item, read_items
from commands import usage_error
from nodes.background import Background

ARRAYS = ("tokens.npy", "features.npy")


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
    assert len({text.number for _, text in shards.texts()}) == 4
    # Once more: nothing is collected, and the training is over.
    assert cli.main(words) == 0
    assert len([*shards.texts()]) == 4
    # With more prompts, whichever they are: only those are answered.
    lines(data, {"prompt": "A tale of mice"}, {"prompt": "A tale of dogs"})
    assert cli.main(words) == 0
    assert len({text.number for _, text in shards.texts()}) == len([*shards.texts()]) == 6


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.torch
def test_a_running_cluster_answers_as_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draft node drafts with a head that reads other depths than are collected."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data = lines(tmp_path / "p.jsonl", *({"prompt": f"A tale of {x}"} for x in ("cats", "dogs")))

    def trained(out: str, *how: str) -> list[tuple[list[int], np.ndarray]]:
        words = ["train-head", "--data", str(data), "--out", str(tmp_path / out), *how]
        assert cli.main([*words, "--max-new-tokens", "24", "--epochs", "0.1"]) == 0
        assert f"--draft eagle:{tmp_path / out}" in capsys.readouterr().out
        folder = tmp_path / out / "training" / "eagle3"
        shards = Shards(folder, read_notes(folder))
        texts = sorted((text.number, shard, text) for shard, text in shards.texts())
        return [
            tuple(np.load(shard / name)[text.start : text.start + text.length] for name in ARRAYS)
            for _, shard, text in texts
        ]

    target = TargetTable(path=str(BUNDLED_TARGET))
    background = Background(
        local_config(target, DraftTable(f"eagle:{BUNDLED_EAGLE}", "flow"), 2, 4)
    )
    try:
        file = tmp_path / "cluster.toml"
        file.write_text(to_toml(background.cluster.config))
        there = trained("there", "--config", str(file))
    finally:
        background.close()
    here = trained("here", "--target", str(BUNDLED_TARGET), "--mode", "exact")
    assert len(there) == len(here) == 4
    for (tokens, rows), (same_tokens, same_rows) in zip(there, here, strict=True):
        np.testing.assert_array_equal(tokens, same_tokens)
        np.testing.assert_array_equal(rows, same_rows)


@pytest.mark.torch
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: Any) -> str:
        given = ("train-head", "--target", str(BUNDLED_TARGET), "--out", tmp_path, *words)
        return usage_error(capsys, *map(str, given))

    config = ("--connect", "127.0.0.1:1")
    assert "--mode is the running cluster's choice; leave it out" in said(*config, "--mode", "fast")
    assert "--disk-gib is 0; it must be above 0" in said("--disk-gib", 0)
    assert "nothing to read" in said("--data", lines(tmp_path / "none.jsonl"))
