"""Penalties on a real model: transformers' own tokens, and the plain definition's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncspec.backend.reference import SESSION, chain, decode
from asyncspec.backend.tree_stage import SlotTokens
from asyncspec.constraint.grammar import Grammars, Vocabulary
from asyncspec.core.jobs import Admit, Batch, Release, Row
from asyncspec.core.sampling import Sampling, seen
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec_protocol.sampling import Constraint
from backend.probe import Probe, cut
from sampling_reference import choose

pytestmark = pytest.mark.torch

NEW = 40
PROMPT = Random(7).choices(range(3, 150), k=70)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_same_tokens_as_generate(penalty: float, tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = torch.tensor([PROMPT])

    def generate(penalty: float) -> list[int]:
        out = model.generate(
            text,
            attention_mask=torch.ones_like(text),
            max_new_tokens=NEW,
            do_sample=False,
            repetition_penalty=penalty,
            eos_token_id=None,
        )
        tokens: list[int] = out[0, len(PROMPT) :].tolist()
        return tokens

    want = generate(penalty)
    assert want != generate(1.0), "a penalty that changes nothing tests nothing"
    checkpoint = open_checkpoint(path)
    how = Sampling(repetition_penalty=penalty)
    for stages in (1, 3):
        assert decode(cut(checkpoint, stages), PROMPT, NEW, sampling=how) == want


@pytest.mark.sampled(4)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": -0.3},
    ],
)
def test_every_token_is_the_definitions(
    penalties: dict[str, float], temperature: float, tiny: Callable[..., Path]
) -> None:
    how = Sampling(temperature=temperature, top_p=0.95, seed=3, **penalties)  # type: ignore[arg-type]
    stages = cut(open_checkpoint(tiny("llama")), 2)
    probe = Probe(stages)
    new = decode(stages, PROMPT, NEW, sampling=how)
    logits = probe.take()
    probe.stop()
    text = PROMPT + new
    for position in range(len(PROMPT), len(text)):
        row = logits[position - 1].double().tolist()
        before = seen(text[:position], len(PROMPT))
        assert text[position] == choose(row, before, position, how)
    assert new != decode(stages, PROMPT, NEW, sampling=Sampling(temperature, top_p=0.95, seed=3))


def test_a_token_counts_as_answer_from_the_end_of_the_users_prompt_on() -> None:
    """Also where a later session of the request reads it as part of its own prompt."""
    tokens = SlotTokens(prompt_length=2)
    path = [5, 6, 5, 7]
    rows = [Row(i, i, tuple(range(i + 1))) for i in range(4)]
    tokens.write(0, rows, path)
    assert [tokens.own(row) for row in rows] == [seen(path[: i + 1], 2) for i in range(4)]
    tokens.write(4, [Row(4, 4, (4,)), Row(5, 4, (5,))], [7, 5])
    assert tokens.counts == seen(path, 2)
    assert tokens.own(Row(4, 4, (4,))) == {7: 2}
    assert tokens.own(Row(5, 4, (5,))) == {5: 2}
    tokens.compact(4, (5,))
    tokens.write(5, [Row(5, 5, (5,))], [9])
    assert tokens.counts == seen([*path, 5], 2)


@pytest.mark.parametrize(
    "how",
    [
        Sampling(repetition_penalty=1.7, presence_penalty=1.0, frequency_penalty=0.8),
        Sampling(constraint=Constraint("start: /([\u0100-\u013f][\u0140-\U0010ffff])+/")),
    ],
)
def test_passes_of_a_batch_draw_as_one_after_the_other(
    how: Sampling, tiny: Callable[..., Path]
) -> None:
    """Also where the second commits what the first computes: its tokens are written first."""
    (stage,) = cut(open_checkpoint(tiny("llama")), 1)
    spelled = [*(chr(0x100 + i).encode() for i in range(stage.info.vocab_size - 1)), b"<end>"]
    stage.constrain(Grammars(lambda: Vocabulary(spelled, (), (2,))))
    prompt, path = PROMPT[:5], [9, 80, 11, 90, 13]
    passes = [chain(SESSION, 0, prompt, None, (4,))]
    passes += [chain(SESSION, 5 + i, [token], None, (0,)) for i, token in enumerate(path)]

    def drawn(*jobs: Any) -> list[Any]:
        stage.run(Admit(SESSION, 20, how, len(prompt)))
        try:
            results = [stage.run(job) for job in jobs]
        finally:
            stage.run(Release(SESSION))
        return [one for result in results for one in cast("tuple[Any, ...]", result)]

    assert drawn(Batch(tuple(passes))) == [(token,) for token in drawn(*passes)]
