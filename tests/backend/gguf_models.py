"""Small GGUF models: random ones of every family; and what llama.cpp itself writes with a whole
file."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason='needs gguf and the extra "llama": make setup-llama')
pytest.importorskip("llama_cpp.llama_cpp", reason='needs the extra "llama": make setup-llama')

import gguf

from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.target import OpenTarget
from backend.stage_cluster import LoadedTarget
from tools.check_device.convert import add_matrix, convert, finish, quantise

__all__ = ["convert", "quantise"]

LAYERS, VOCAB, WIDTH, HEADS, KV_HEADS, HEAD, FEED = 5, 160, 64, 4, 2, 16, 96
EXPERTS, EXPERT_FEED = 4, 32

_SWA = {"attention.sliding_window": 16}
_EXPERTS = {
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": EXPERT_FEED,
}
_FACTORS = [1.0 + i / 8 for i in range(HEAD // 2)]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tied": True},
    "llama-freqs": {"globals": {"rope_freqs.weight": _FACTORS}},
    "mixtral": {"experts": {"expert_count": EXPERTS, "expert_used_count": 2}},
    "mistral3": {"arch": "mistral3"},
    "qwen2": {"arch": "qwen2", "biases": True},
    "qwen3": {"arch": "qwen3", "norms": "head"},
    "qwen3moe": {"arch": "qwen3moe", "norms": "head", "experts": _EXPERTS},
    "gemma": {"arch": "gemma", "tied": True},
    "gemma2": {
        "arch": "gemma2",
        "tied": True,
        "keys": _SWA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "post_norms": True,
    },
    "gemma3": {"arch": "gemma3", "tied": True, "keys": _SWA, "post_norms": True, "norms": "head"},
    "phi3": {"arch": "phi3", "fused": True},
    "phi3-long": {
        "arch": "phi3",
        "fused": True,
        "keys": {
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.1,
        },
        "globals": {
            "rope_factors_long.weight": _FACTORS,
            "rope_factors_short.weight": [1.0] * (HEAD // 2),
        },
    },
    "gpt-oss": {
        "arch": "gpt-oss",
        "keys": _SWA,
        "experts": _EXPERTS,
        "biases": True,
        "all_biases": True,
        "post_norms": "attention",
    },
    "granite": {
        "arch": "granite",
        "keys": {
            "embedding_scale": 3.0,
            "residual_scale": 0.5,
            "logit_scale": 2.0,
            "attention.scale": 0.2,
        },
    },
    "olmo2": {"arch": "olmo2", "post_norms": "only", "norms": "row"},
    "deepseek2": {
        "arch": "deepseek2",
        "mla": True,
        "experts": _EXPERTS
        | {
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.0,
            "expert_gating_func": 1,
        },
    },
}


class Writer:
    """One random model."""

    def __init__(self, path: Path, family: str, kind: str, seed: int) -> None:
        self.spec = FAMILIES.get(family, {"arch": family})
        self.arch = self.spec.get("arch", "llama")
        self.kind, self.random = kind, np.random.default_rng(seed)
        self.file = gguf.GGUFWriter(path, self.arch)

    def key(self, name: str, value: Any) -> None:
        add = self.file.add_float32 if isinstance(value, float) else self.file.add_uint32
        add(f"{self.arch}.{name}", value)

    def matrix(self, name: str, *shape: int, scale: float = 1.5) -> None:
        values = self.random.standard_normal(shape, np.float32) * scale / math.sqrt(shape[-1])
        add_matrix(self.file, name, values, self.kind)

    def vector(self, name: str, *shape: int, around: float = 1.0) -> None:
        values = around + 0.1 * self.random.standard_normal(shape, np.float32)
        self.file.add_tensor(name, values.astype(np.float32))


def base_keys(layers: int) -> dict[str, Any]:
    """Metadata of a model with so many layers, which families add to."""
    return {
        "block_count": layers,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": VOCAB,
    }


def save_random(
    path: Path, family: str = "llama", *, layers: int = LAYERS, kind: str = "F16", seed: int = 0
) -> Path:
    """A random model, without a vocabulary of texts."""
    out = Writer(path, family, kind, seed)
    spec = out.spec
    keys = base_keys(layers)
    if spec.get("mla"):
        keys |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 24,
            "attention.kv_lora_rank": 32,
            "attention.key_length": 32 + 8,
            "attention.value_length": 32,
            "attention.key_length_mla": HEAD + 8,
            "attention.value_length_mla": HEAD,
            "rope.dimension_count": 8,
        }
    for name, value in (keys | spec.get("keys", {}) | spec.get("experts", {})).items():
        out.key(name, value)
    out.file.add_tokenizer_model("no_vocab")
    out.matrix("token_embd.weight", VOCAB, WIDTH, scale=0.3 if spec.get("tied") else 6.0)
    out.vector("output_norm.weight", WIDTH)
    if not spec.get("tied"):
        out.matrix("output.weight", VOCAB, WIDTH, scale=3.0)
    for name, values in spec.get("globals", {}).items():
        out.file.add_tensor(name, np.array(values, np.float32))
    for layer in range(layers):
        _attention(out, f"blk.{layer}.")
        _feed_forward(
            out,
            f"blk.{layer}.",
            dense=layer
            < spec.get("experts", {}).get(
                "leading_dense_block_count", 0 if "experts" in spec else layers
            ),
        )
    finish(out.file)
    return path


def _attention(out: Writer, at: str) -> None:
    spec, query, keys = out.spec, HEADS * HEAD, KV_HEADS * HEAD
    post = spec.get("post_norms")
    if post != "only":
        out.vector(f"{at}attn_norm.weight", WIDTH)
    if post:
        out.vector(f"{at}post_attention_norm.weight", WIDTH)
    if spec.get("mla"):
        out.matrix(f"{at}attn_q_a.weight", 24, WIDTH)
        out.vector(f"{at}attn_q_a_norm.weight", 24)
        out.matrix(f"{at}attn_q_b.weight", HEADS * (HEAD + 8), 24)
        out.matrix(f"{at}attn_kv_a_mqa.weight", 32 + 8, WIDTH)
        out.vector(f"{at}attn_kv_a_norm.weight", 32)
        out.matrix(f"{at}attn_k_b.weight", HEADS, 32, HEAD)
        out.matrix(f"{at}attn_v_b.weight", HEADS, HEAD, 32)
    elif spec.get("fused"):
        out.matrix(f"{at}attn_qkv.weight", query + 2 * keys, WIDTH)
    else:
        for name, height in (("q", query), ("k", keys), ("v", keys)):
            out.matrix(f"{at}attn_{name}.weight", height, WIDTH)
            if spec.get("biases"):
                out.vector(f"{at}attn_{name}.bias", height, around=0.0)
    if (norms := spec.get("norms")) is not None:
        out.vector(f"{at}attn_q_norm.weight", HEAD if norms == "head" else query)
        out.vector(f"{at}attn_k_norm.weight", HEAD if norms == "head" else keys)
    out.matrix(f"{at}attn_output.weight", WIDTH, query)
    if spec.get("all_biases"):
        out.vector(f"{at}attn_output.bias", WIDTH, around=0.0)
        out.vector(f"{at}attn_sinks.weight", HEADS)


def _feed_forward(out: Writer, at: str, *, dense: bool) -> None:
    spec = out.spec
    post = spec.get("post_norms")
    if post not in ("only", "attention"):
        out.vector(f"{at}ffn_norm.weight", WIDTH)
    if post in (True, "only"):
        out.vector(f"{at}post_ffw_norm.weight", WIDTH)
    if dense:
        if not spec.get("fused"):
            out.matrix(f"{at}ffn_gate.weight", FEED, WIDTH)
        out.matrix(f"{at}ffn_up.weight", 2 * FEED if spec.get("fused") else FEED, WIDTH)
        out.matrix(f"{at}ffn_down.weight", WIDTH, FEED)
        return
    wide = spec["experts"].get("expert_feed_forward_length", FEED)
    out.matrix(f"{at}ffn_gate_inp.weight", EXPERTS, WIDTH)
    parts = {"gate": (wide, WIDTH), "up": (wide, WIDTH), "down": (WIDTH, wide)}
    for name, shape in parts.items():
        out.matrix(f"{at}ffn_{name}_exps.weight", EXPERTS, *shape)
        if spec.get("all_biases"):
            out.vector(f"{at}ffn_{name}_exps.bias", EXPERTS, shape[0], around=0.0)
        if "expert_shared_count" in spec["experts"]:
            out.matrix(f"{at}ffn_{name}_shexp.weight", *shape)
    if spec.get("all_biases"):
        out.vector(f"{at}ffn_gate_inp.bias", EXPERTS, around=0.0)


class LoadedGGUF(LoadedTarget[LlamaStage]):
    """The stages of a model, for clusters in the simulator."""

    def __init__(self, target: OpenTarget) -> None:
        super().__init__(target.info)
        self.target = target

    def load(self, first: int, end: int) -> LlamaStage:
        stage = load_stage(self.target, first, end)
        assert stage.guarantee == "bitwise"
        return stage


# --- llama.cpp itself.


def own_greedy(path: Path, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
    """What llama.cpp writes with the whole file, one token a pass and greedily; and the least lead
    of a token over the next best."""
    found, logits = own_logits(path, prompt, count)
    best = np.sort(logits, -1)
    return found, float((best[:, -1] - best[:, -2]).min())


def own_logits(path: Path, prompt: Sequence[int], count: int) -> tuple[list[int], Any]:
    """The same text, and the logits [count, vocab] of its tokens."""
    from asyncspec.plugins.llama.library import bindings

    bound = bindings()
    parameters = bound.llama_model_default_params()
    parameters.use_extra_bufts = False
    model = bound.llama_model_load_from_file(str(path).encode(), parameters)
    settings = bound.llama_context_default_params()
    settings.n_ctx = 512
    settings.n_threads = settings.n_threads_batch = 1
    context = bound.llama_init_from_model(model, settings)
    rows: list[Any] = []
    fresh = list(prompt)
    vocab = bound.llama_vocab_n_tokens(bound.llama_model_get_vocab(model))
    try:
        while len(rows) < count:
            tokens = (ctypes.c_int32 * len(fresh))(*fresh)
            assert bound.llama_decode(context, bound.llama_batch_get_one(tokens, len(fresh))) == 0
            pointer = bound.llama_get_logits_ith(context, -1)
            rows.append(np.ctypeslib.as_array(pointer, (vocab,)).copy())
            fresh = [int(rows[-1].argmax())]
    finally:
        bound.llama_free(context)
        bound.llama_model_free(model)
    return [int(row.argmax()) for row in rows], np.stack(rows)
