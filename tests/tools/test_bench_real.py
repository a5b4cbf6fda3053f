"""``tools/bench real``: what is compared, what its rows say, and answers that differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_EAGLE, BUNDLED_TARGET
from tools.bench import real, real_engines


def answer(tokens: list[int], speed: float) -> dict[str, Any]:
    stats = {
        "tokens_per_second": speed,
        "new_tokens": float(len(tokens)),
        "passes": 2.0,
        "rounds": 1.0,
        "hits": 1.0,
        "misses": 1.0,
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


def test_a_row_for_each_setting_with_a_column_for_each_set(
    options: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_prompts(words: list[str], prompts: list[str]) -> list[dict[str, Any]]:
        fast = 4.0 if "ngram+suffix" in words else 1.0
        return [answer([5, 6, 7], fast * (1 + i)) for i in range(len(prompts))]

    monkeypatch.setattr(real_engines, "run_prompts", run_prompts)
    assert real.run(options) == 0
    rows = json.loads(capsys.readouterr().out)
    sources = ["none", "ngram+suffix", "eagle", "eagle+ngram+suffix"]
    assert [row["source"] for row in rows] == sources
    assert all({"code", "tales", "rewriting"} < row.keys() for row in rows)
    assert [row["times plain"] for row in rows] == [1.0, 4.0, 1.0, 1.0]
    # Rewriting counts for itself alone: its prompts are the last, and the fastest.
    assert rows[0]["tokens/s"] == 1.5
    for row in rows:
        assert (row["tokens a pass"], row["tokens a round"]) == (1.0, 2.0)
        assert row["agreement"] == 0.5


def test_another_text_is_an_error(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_prompts(words: list[str], prompts: list[str]) -> list[dict[str, Any]]:
        return [answer([5, 8 if "flow" in words else 6, 7], 1.0) for _ in prompts]

    monkeypatch.setattr(real_engines, "run_prompts", run_prompts)
    with pytest.raises(ClusterError, match=r"says something else .* to prompt 0 of code"):
        real.run(options)


def test_another_text_than_the_models_own_is_an_error(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_prompts(words: list[str], prompts: list[str]) -> list[dict[str, Any]]:
        return [answer([5, 6, 7], 1.0) for _ in prompts]

    monkeypatch.setattr(real_engines, "run_prompts", run_prompts)
    monkeypatch.setattr(real, "strays", lambda target, dtype, prompts, answers: prompts[:1])
    options.reference = True
    with pytest.raises(ClusterError, match="something else than the model alone to prompt 0"):
        real.run(options)


@pytest.mark.slow
@pytest.mark.torch
def test_the_virtual_clock_gives_generates_texts(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    options.target, options.head = str(BUNDLED_TARGET), Path(BUNDLED_EAGLE)
    options.engine, options.tokens, options.reference = "virtual", 12, True
    options.per_file, options.dtype = 1, "float32"
    assert real.run(options) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["times plain"] == 1.0
    assert rows[2]["times plain"] > 1.5
