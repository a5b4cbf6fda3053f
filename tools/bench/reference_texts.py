"""What a model says greedily by its own library: Hugging Face ``generate``, or llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.registry import backend_name, backend_of
from tools.bench.prompts import Prompt, encoded

Tokens = tuple[int, ...]


def greedy_texts(
    target: str, dtype: str, prompts: Sequence[Prompt], tokens: int
) -> list[Tokens]:
    """An answer to each prompt, which is a user's message where the model has a template."""
    backend = backend_of(target)
    model = backend.open(target)
    with closing(backend.load_tokenizer(model)) as tokenizer:
        inputs = [encoded(tokenizer, prompt.text) for prompt in prompts]
    kind = _llama if backend_name(target) == "llama" else _generate
    answer = kind(backend.locate(target), dtype, model.info, tokens)
    return [answer(tokens) for tokens in inputs]


def _generate(path: str, dtype: str, info: ModelInfo, limit: int) -> Callable[[Tokens], Tokens]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    def answer(prompt: Tokens) -> Tokens:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=list(info.eos_token_ids),
                pad_token_id=info.eos_token_ids[0],
            )
        return tuple(out[0, len(prompt) :].tolist())

    return answer


def _llama(path: str, dtype: str, info: ModelInfo, limit: int) -> Callable[[Tokens], Tokens]:
    import llama_cpp

    model = llama_cpp.Llama(path, n_ctx=2048, n_threads=1, verbose=False)

    def answer(prompt: Tokens) -> Tokens:
        model.reset()
        written: list[int] = []
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            written.append(token)
            if token in info.eos_token_ids or len(written) == limit:
                break
        return tuple(written)

    return answer
