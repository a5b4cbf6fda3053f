"""``bench record-language`` against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncspec.core.costs import StageCost
from asyncspec.sim.costs import ClusterCost
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.plugins.simulation.cluster import Setting, simulate
from asyncspec_nodes.plugins.simulation.recorded import read_language
from tools.bench.__main__ import main

pytestmark = [pytest.mark.nightly, pytest.mark.torch]


def record(tmp_path: Path, *argv: str) -> Path:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    line = json.dumps({"turns": ["Once upon a time there was a fox. The fox"]})
    (prompts / "one.jsonl").write_text(line + "\n")
    path = tmp_path / "language"
    assert main(["record-language", "--prompts", str(prompts), *argv, str(path)]) == 0
    return path


def test_it_records_what_transformers_says(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    language = read_language(record(tmp_path, "--max-new-tokens", "12", "--candidates", "6"))
    (text,) = language.texts
    target = AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET, dtype=torch.float32)
    ids = torch.tensor([text.prompt])
    answer = target.generate(ids, max_new_tokens=12, do_sample=False)[0, len(text.prompt) :]
    assert text.tokens == tuple(answer.tolist())
    draft = AutoModelForCausalLM.from_pretrained(BUNDLED_DRAFT, dtype=torch.float32)
    with torch.inference_mode():
        logits = draft(torch.tensor([text.prompt + text.tokens])).logits[0]
    rows = torch.log_softmax(logits.float(), -1)[len(text.prompt) - 1 : -1]
    best = rows.topk(6)
    assert text.candidates == tuple(map(tuple, best.indices.tolist()))
    assert torch.allclose(torch.tensor(text.scores), best.values, atol=1e-3)


def test_it_can_be_simulated(tmp_path: Path) -> None:
    path = record(tmp_path, "--max-new-tokens", "20", "--temperature", "0.8")
    cost = ClusterCost(stage=StageCost(plateau=8, row_seconds=0.1))
    outcome = simulate(Setting(read_language(path), cost), "flowspec")
    assert outcome.stats[0]["new_tokens"] == 20
