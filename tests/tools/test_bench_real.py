"""``tools/bench real``: what is compared, what its rows say, and answers that differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from asyncspec.core.errors import ClusterError
from tools.bench import real


def answer(tokens: list[int], speed: float) -> dict[str, Any]:
    stats = {
        "tokens_per_second": speed,
        "tokens_per_round": 2.0,
        "new_tokens": float(len(tokens)),
        "passes": 2.0,
    }
    return {"token_ids": tokens, "stats": stats}


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    for name in ("code", "tales"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"turns": [name]}) + "\n")
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    parser = argparse.ArgumentParser()
    real.add_arguments(parser)
    words = ["--prompts", str(tmp_path), "--head", str(head), "--target", "some.gguf", "--json"]
    return parser.parse_args([*words, "--policies", "flow", "--temperatures", "0"])


def test_every_setting_has_a_row_for_each_set_and_for_all(
    options: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_prompts(words: list[str], prompts: list[str]) -> list[dict[str, Any]]:
        fast = 4.0 if "ngram+suffix" in words else 1.0
        return [answer([5, 6, 7], fast * (1 + i)) for i in range(len(prompts))]

    monkeypatch.setattr(real, "run_prompts", run_prompts)
    assert real.run(options) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["source"], row["set"]) for row in rows] == [
        (source, part)
        for source in ("none", "ngram+suffix", "eagle", "eagle+ngram+suffix")
        for part in ("code", "tales", "all")
    ]
    assert {row["over_plain"] for row in rows if row["source"] == "ngram+suffix"} == {4.0}
    assert {row["tokens_per_pass"] for row in rows} == {1.0}


def test_another_text_is_an_error(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_prompts(words: list[str], prompts: list[str]) -> list[dict[str, Any]]:
        return [answer([5, 8 if "flow" in words else 6, 7], 1.0) for _ in prompts]

    monkeypatch.setattr(real, "run_prompts", run_prompts)
    with pytest.raises(ClusterError, match=r"says something else .* to prompt 0 of code"):
        real.run(options)
