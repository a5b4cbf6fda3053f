"""A process with a whole model on an engine alone: the first token of prompts, one a line of JSON.

Its argument is a JSON object: what ``readers.Alone`` says. A question is a list of token ids, an
answer the fields of ``readers.FirstToken``. It is run as a file, not imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncspec.backend.threads import set_thread_count

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BATCH = 2048
"""Tokens of a ``llama_decode``, llama.cpp's default; passes are of its default ``n_ubatch``."""

BY_LAYER, ALL_LAYERS = 1, 1_000_000
"""``LLAMA_SPLIT_MODE_LAYER``; more layers than any model has, with what comes after them."""

Logits = Callable[[Sequence[int]], "npt.NDArray[np.float32]"]
"""The logits behind a prompt."""


def main() -> None:
    """Serve until standard input ends."""
    settings = json.loads(sys.argv[1])
    set_thread_count(settings["threads"])  # before torch is imported
    logits_of = {"hf": _transformers, "llama": _llama_cpp}[settings["engine"]](settings)
    for line in sys.stdin:
        ids = json.loads(line)
        start = time.perf_counter()
        logits = logits_of(ids)
        token = int(logits.argmax())
        seconds = time.perf_counter() - start
        best = (-logits).argsort(kind="stable")[: settings["likely"]]
        gaps = {int(n): float(logits[token] - logits[n]) for n in best}
        print(json.dumps({"seconds": seconds, "token": token, "gaps": gaps}), flush=True)


def _transformers(settings: dict[str, Any]) -> Logits:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    weights = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings["weights"]]
    model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=weights).eval()

    def logits(ids: Sequence[int]) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        return output.logits[0, -1].float().numpy()  # type: ignore[no-any-return]

    return logits


def _llama_cpp(settings: dict[str, Any]) -> Logits:
    import ctypes

    import numpy as np

    from asyncspec.plugins.llama.library import bindings

    bound = bindings()
    how = bound.llama_model_default_params()
    how.n_gpu_layers, how.use_extra_bufts = 0, settings["weights"] == "repacked"
    devices = [_rpc_device(bound, place) for place in settings["workers"]]
    if devices:
        how.n_gpu_layers, how.split_mode = ALL_LAYERS, BY_LAYER
        listed = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        even = (ctypes.c_float * bound.llama_max_devices())(*(1.0 for _ in devices))
        how.devices, how.tensor_split = ctypes.addressof(listed), even
    model = bound.llama_model_load_from_file(settings["target"].encode(), how)
    parameters = bound.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch = settings["context"], min(settings["context"], BATCH)
    parameters.n_ubatch = settings["pass_rows"] or parameters.n_ubatch
    parameters.n_threads = parameters.n_threads_batch = settings["threads"]
    handle = bound.llama_init_from_model(model, parameters)
    vocab = bound.llama_vocab_n_tokens(bound.llama_model_get_vocab(model))

    def logits(ids: Sequence[int]) -> npt.NDArray[np.float32]:
        bound.llama_memory_clear(bound.llama_get_memory(handle), True)
        for start in range(0, len(ids), parameters.n_batch):
            part = ids[start : start + parameters.n_batch]
            tokens = (ctypes.c_int32 * len(part))(*part)
            if code := bound.llama_decode(handle, bound.llama_batch_get_one(tokens, len(part))):
                raise RuntimeError(f"llama_decode has failed with {code}")
        return np.ctypeslib.as_array(bound.llama_get_logits_ith(handle, -1), (vocab,))

    return logits


def _rpc_device(bound: Any, place: str) -> int:
    """The ``ggml_backend_dev_t`` of llama.cpp's RPC worker at ``HOST:PORT``."""
    import ctypes

    def call(name: str, *arguments: object) -> int:
        function = getattr(bound._lib, f"ggml_backend_{name}")
        function.restype = ctypes.c_void_p
        handle: int | None = function(*arguments)
        if handle is None:
            raise RuntimeError(f"ggml_backend_{name}{arguments} has failed")
        return handle

    rpc = ctypes.c_void_p(call("reg_by_name", b"RPC"))
    address = call("reg_get_proc_address", rpc, b"ggml_backend_rpc_add_server")
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    worker = ctypes.c_void_p(add(place.encode()))
    call_register = bound._lib.ggml_backend_register
    call_register.restype = None
    call_register(worker)
    return call("reg_dev_get", worker, ctypes.c_size_t(0))


if __name__ == "__main__":
    main()
