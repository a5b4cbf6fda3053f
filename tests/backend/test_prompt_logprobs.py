"""Scores of a prompt in chunks are those of one plain forward pass by Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from asyncspec.backend.base import Mode
from asyncspec.backend.reference import SESSION, chain
from asyncspec.core.jobs import Admit, SamplerOutput
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.model.stage import load_stage
from asyncspec_protocol.messages import PromptLogprobs
from backend.tiny import LAYERS, save_tiny

pytestmark = pytest.mark.torch

PROMPT = [(7 * i * i + 3) % 150 for i in range(50)]
TOP = 3


def scored(stages: Sequence[Any], chunk: int, features: tuple[int, ...]) -> list[PromptLogprobs]:
    """Of all prompt tokens but the first, by stages that read it in chunks."""
    for stage in stages:
        stage.run(Admit(SESSION, 64, Sampling(), features=features, prompt_logprobs=TOP))
    parts = []
    for start in range(0, len(PROMPT), chunk):
        tokens, after = PROMPT[start : start + chunk], PROMPT[start + 1 : start + chunk + 1]
        hidden = stages[0].run(chain(SESSION, start, tokens, None, ()))
        ends = len(after) < len(tokens)
        job = chain(SESSION, start, tokens, hidden, (len(tokens) - 1,) if ends else ())
        output: Any = stages[1].run(replace(job, scored_tokens=tuple(after)))
        if isinstance(output, tuple):
            output = SamplerOutput(output)
        assert len(output.tokens) == ends
        assert (output.features is not None) == bool(features)
        if output.prompt_logprobs is not None:
            parts.append(output.prompt_logprobs)
    return parts


@pytest.mark.parametrize(
    ("mode", "chunk", "features"), [("exact", 49, ()), ("fast", 16, (1, 5)), ("exact", 7, (5,))]
)
def test_scores_are_those_of_a_plain_pass(
    tmp_path: Path, mode: Mode, chunk: int, features: tuple[int, ...]
) -> None:
    path = save_tiny(tmp_path)
    checkpoint = open_checkpoint(str(path))
    spans = ((0, 2), (2, LAYERS))
    stages = [load_stage(checkpoint, *span, dtype="float32", mode=mode) for span in spans]
    parts = scored(stages, chunk, features)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        rows = model(torch.tensor([PROMPT])).logits[0, :-1].double().log_softmax(-1)
    want = rows.gather(1, torch.tensor(PROMPT[1:])[:, None])
    ranks = 1 + (rows > want).sum(1)
    best = rows.topk(TOP)
    said = [value for part in parts for value in part.log_probs]
    assert said == pytest.approx(want[:, 0].tolist(), abs=1e-3)
    assert [rank for part in parts for rank in part.ranks] == ranks.tolist()
    assert [t for part in parts for t in part.top_tokens] == best.indices.flatten().tolist()
    likeliest = [value for part in parts for value in part.top_log_probs]
    assert likeliest == pytest.approx(best.values.flatten().tolist(), abs=1e-3)
