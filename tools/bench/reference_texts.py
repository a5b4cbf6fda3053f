"""What a model says greedily by its own library: Hugging Face ``generate``, or llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.registry import backend_name, backend_of
from tools.bench.prompts import Prompt, encoded

Tokens = tuple[int, ...]

Check = Callable[[Tokens, Tokens], bool]
"""Whether an answer to a prompt is the model's own."""


def strays(
    target: str, dtype: str, prompts: Sequence[Prompt], answers: Sequence[Tokens]
) -> list[Prompt]:
    """The prompts whose greedy answers are not what the model says alone. A prompt is a user's
    message where the model has a template."""
    backend = backend_of(target)
    model = backend.open(target)
    with closing(backend.load_tokenizer(model)) as tokenizer:
        inputs = [encoded(tokenizer, prompt.text) for prompt in prompts]
    kind = _llama if backend_name(target) == "llama" else _generate
    check = kind(backend.locate(target), dtype, model.info)
    pairs = zip(prompts, inputs, answers, strict=True)
    return [prompt for prompt, tokens, answer in pairs if not check(tokens, answer)]


def _generate(path: str, dtype: str, info: ModelInfo) -> Check:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    def check(prompt: Tokens, answer: Tokens) -> bool:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=len(answer),
                do_sample=False,
                eos_token_id=list(info.eos_token_ids),
                pad_token_id=info.eos_token_ids[0],
            )
        return tuple(out[0, len(prompt) :].tolist()) == answer

    return check


def _llama(path: str, dtype: str, info: ModelInfo) -> Check:
    """llama.cpp reads a row a pass, with flash attention, which it takes by itself where it can: in
    passes of many rows it rounds otherwise, and where two tokens are near goes on with the other.
    """
    import llama_cpp

    how: Any = {"n_ctx": 2048, "n_batch": 1, "n_ubatch": 1, "n_threads": 1, "flash_attn": True}
    model = llama_cpp.Llama(path, **how, verbose=False)

    def check(prompt: Tokens, answer: Tokens) -> bool:
        model.reset()
        written = model.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
        return tuple(islice(written, len(answer))) == answer

    return check
