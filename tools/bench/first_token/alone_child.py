"""A process with a whole model on the engine alone: the first token of prompts, one a line of JSON.

Arguments: ``hf`` or ``llama``, the model, its dtype or, of a GGUF file, ``repacked`` where this CPU
computes with repacked weights, number of threads, tokens of the context. A question is a list of
token ids, an answer ``{seconds, token}``. It is run as a file, not imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

from asyncspec.backend.threads import set_thread_count

BATCH = 2048
"""Tokens of a ``llama_decode``, llama.cpp's default; passes are of its default ``n_ubatch``."""

FirstToken = Callable[[Sequence[int]], int]


def main() -> None:
    """Serve until standard input ends."""
    kind, path, dtype, threads, context = sys.argv[1:]
    set_thread_count(int(threads))  # before torch is imported
    load = {"hf": _transformers, "llama": _llama_cpp}[kind]
    first_token = load(path, dtype, int(threads), int(context))
    for line in sys.stdin:
        ids = json.loads(line)
        start = time.perf_counter()
        token = first_token(ids)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "token": token}), flush=True)


def _transformers(path: str, dtype: str, threads: int, context: int) -> FirstToken:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    weights = {"fp32": torch.float32, "bf16": torch.bfloat16, "auto": "auto"}[dtype]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=weights).eval()

    def first_token(ids: Sequence[int]) -> int:
        with torch.inference_mode():
            output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    return first_token


def _llama_cpp(path: str, layout: str, threads: int, context: int) -> FirstToken:
    import ctypes

    import numpy as np

    from asyncspec.plugins.llama.library import bindings

    bound = bindings()
    settings = bound.llama_model_default_params()
    settings.n_gpu_layers, settings.use_extra_bufts = 0, layout == "repacked"
    model = bound.llama_model_load_from_file(path.encode(), settings)
    parameters = bound.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch = context, min(context, BATCH)
    parameters.n_threads = parameters.n_threads_batch = threads
    handle = bound.llama_init_from_model(model, parameters)
    vocab = bound.llama_vocab_n_tokens(bound.llama_model_get_vocab(model))

    def first_token(ids: Sequence[int]) -> int:
        bound.llama_memory_clear(bound.llama_get_memory(handle), True)
        for start in range(0, len(ids), parameters.n_batch):
            part = ids[start : start + parameters.n_batch]
            tokens = (ctypes.c_int32 * len(part))(*part)
            if code := bound.llama_decode(handle, bound.llama_batch_get_one(tokens, len(part))):
                raise RuntimeError(f"llama_decode has failed with {code}")
        logits = bound.llama_get_logits_ith(handle, -1)
        return int(np.ctypeslib.as_array(logits, (vocab,)).argmax())

    return first_token


if __name__ == "__main__":
    main()
