"""Small random GGUF models of families with recurrent layers, as llama.cpp reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from backend.gguf_models import FEED, HEAD, HEADS, KV_HEADS, VOCAB, WIDTH, Writer, base_keys
from tools.check_device.convert import add_vocabulary, finish

KERNEL, STATE, GROUPS, INNER, RANK = 4, 16, 2, 2 * WIDTH, 8
"""Of Mamba-2 layers; gated delta nets have heads of ``STATE`` numbers."""

ATTENTION, STATES, FEED_FORWARD = "a", "s", "f"

KINDS = {
    "lfm2": "sasasa",
    "lfm2moe": "sasasa",
    "qwen35": "sasasa",
    "qwen3next": "sasasa",
    "nemotron_h": "sfasfasfa",
    "nemotron_h_moe": "sfasfasfa",
    "granitehybrid": "sasasa",
    "falcon-h1": "ssss",
    "mamba2": "ssss",
}
"""By family, its layers: of attention, with states, or neither."""


_VOCABULARY = ("tokenizer", "config")
"""Files of a checkpoint that say what its tokens are."""


def save_recurrent(path: Path, family: str, seed: int = 0, vocabulary: Path | None = None) -> Path:
    """A random model; ``vocabulary``: that of a checkpoint, else it has none of texts."""
    out = Writer(path, family, "F16", seed)
    kinds, count = KINDS[family], VOCAB
    keys = _keys(family, kinds)
    if vocabulary is None:
        out.file.add_tokenizer_model("no_vocab")
    else:
        read = [json.loads((vocabulary / f"{name}.json").read_text()) for name in _VOCABULARY]
        add_vocabulary(out.file, *read)
        keys["vocab_size"] = count = read[1]["vocab_size"]
    for name, value in keys.items():
        if isinstance(value, list):
            out.file.add_array(f"{family}.{name}", value)
        else:
            out.key(name, value)
    out.matrix("token_embd.weight", count, WIDTH, scale=6.0)
    out.vector(
        "token_embd_norm.weight" if family.startswith("lfm2") else "output_norm.weight", WIDTH
    )
    out.matrix("output.weight", count, WIDTH, scale=3.0)
    for layer, kind in enumerate(kinds):
        _layer(out, family, f"blk.{layer}.", kind)
    finish(out.file)
    return path


def _keys(family: str, kinds: str) -> dict[str, Any]:
    keys = base_keys(len(kinds))
    if family.startswith("lfm2"):
        keys["shortconv.l_cache"] = 3
    else:
        delta = family in ("qwen35", "qwen3next")
        keys |= {
            "ssm.conv_kernel": KERNEL,
            "ssm.inner_size": STATE * RANK if delta else INNER,
            "ssm.state_size": STATE,
            "ssm.time_step_rank": RANK,
            "ssm.group_count": GROUPS,
        }
    if family in ("qwen35", "qwen3next"):
        keys["full_attention_interval"] = 2
    if family == "qwen35":
        keys["rope.dimension_sections"] = [2, 2, 2, 0]
    if family == "qwen3next":
        keys |= {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 32,
        }
    if family.startswith(("lfm2", "nemotron_h", "granitehybrid")):
        keys["attention.head_count_kv"] = [KV_HEADS * (kind == ATTENTION) for kind in kinds]
    if family in ("lfm2moe", "nemotron_h_moe"):
        keys |= {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
        }
        if family == "lfm2moe":
            keys["leading_dense_block_count"] = 2
        else:
            keys |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": 32}
    if family.startswith("nemotron_h"):
        keys["attention.layer_norm_epsilon"] = 1e-5
        keys["feed_forward_length"] = [FEED * (kind == FEED_FORWARD) for kind in kinds]
    return keys


def _layer(out: Writer, family: str, at: str, kind: str) -> None:
    out.vector(f"{at}attn_norm.weight", WIDTH)
    delta = family in ("qwen35", "qwen3next")
    if kind == STATES:
        (_convolution if family.startswith("lfm2") else _delta_net if delta else _mamba)(
            out, family, at
        )
    if kind == ATTENTION or family == "falcon-h1":
        _attention(out, family, at)
    nemotron = family.startswith("nemotron_h")
    if family == "mamba2" or (nemotron and kind != FEED_FORWARD):
        return
    if family == "nemotron_h_moe":
        _experts(out, at, "up")
        out.matrix(f"{at}ffn_up_shexp.weight", 32, WIDTH)
        out.matrix(f"{at}ffn_down_shexp.weight", WIDTH, 32)
        return
    if family == "nemotron_h":
        out.matrix(f"{at}ffn_up.weight", FEED, WIDTH)
        out.matrix(f"{at}ffn_down.weight", WIDTH, FEED)
        return
    norm = "post_attention_norm.weight" if delta else "ffn_norm.weight"
    out.vector(f"{at}{'ffn_norm' if family == 'falcon-h1' else norm}", WIDTH)
    if family == "lfm2moe" and int(at.split(".")[1]) >= 2:
        _experts(out, at, "gate", "up")
        return
    if family != "qwen3next":
        for name in ("gate", "up"):
            out.matrix(f"{at}ffn_{name}.weight", FEED, WIDTH)
        out.matrix(f"{at}ffn_down.weight", WIDTH, FEED)
        return
    out.matrix(f"{at}ffn_gate_inp.weight", 4, WIDTH)
    out.vector(f"{at}ffn_gate_inp_shexp.weight", WIDTH)
    for name in ("gate", "up"):
        out.matrix(f"{at}ffn_{name}_exps.weight", 4, 32, WIDTH)
        out.matrix(f"{at}ffn_{name}_shexp.weight", 32, WIDTH)
    out.matrix(f"{at}ffn_down_exps.weight", 4, WIDTH, 32)
    out.matrix(f"{at}ffn_down_shexp.weight", WIDTH, 32)


def _experts(out: Writer, at: str, *inner: str) -> None:
    out.matrix(f"{at}ffn_gate_inp.weight", 4, WIDTH)
    out.vector(f"{at}exp_probs_b.bias", 4, around=0.0)
    for name in inner:
        out.matrix(f"{at}ffn_{name}_exps.weight", 4, 32, WIDTH)
    out.matrix(f"{at}ffn_down_exps.weight", 4, WIDTH, 32)


def _attention(out: Writer, family: str, at: str) -> None:
    query, keys = HEADS * HEAD, KV_HEADS * HEAD
    gated = 2 if family in ("qwen35", "qwen3next") else 1
    for name, height in (("q", query * gated), ("k", keys), ("v", keys)):
        out.matrix(f"{at}attn_{name}.weight", height, WIDTH)
    if family in ("lfm2", "lfm2moe", "qwen35", "qwen3next"):
        out.vector(f"{at}attn_q_norm.weight", HEAD)
        out.vector(f"{at}attn_k_norm.weight", HEAD)
    out.matrix(f"{at}attn_output.weight", WIDTH, query)


def _convolution(out: Writer, family: str, at: str) -> None:
    out.vector(f"{at}shortconv.conv.weight", WIDTH, 3)
    out.matrix(f"{at}shortconv.in_proj.weight", 3 * WIDTH, WIDTH)
    out.matrix(f"{at}shortconv.out_proj.weight", WIDTH, WIDTH)


def _delta_net(out: Writer, family: str, at: str) -> None:
    keys, values = STATE * GROUPS, STATE * RANK
    out.matrix(f"{at}attn_qkv.weight", 2 * keys + values, WIDTH)
    out.matrix(f"{at}attn_gate.weight", values, WIDTH)
    out.vector(f"{at}ssm_conv1d.weight", 2 * keys + values, KERNEL, around=0.3)
    out.vector(f"{at}ssm_dt.bias", RANK)
    out.vector(f"{at}ssm_a", RANK, around=-1.0)
    if family == "qwen3next":
        out.matrix(f"{at}ssm_ba.weight", 2 * RANK, WIDTH)
    else:
        out.matrix(f"{at}ssm_beta.weight", RANK, WIDTH)
        out.matrix(f"{at}ssm_alpha.weight", RANK, WIDTH)
    out.vector(f"{at}ssm_norm.weight", STATE)
    out.matrix(f"{at}ssm_out.weight", WIDTH, values)


def _mamba(out: Writer, family: str, at: str) -> None:
    wide = INNER + 2 * GROUPS * STATE
    out.matrix(f"{at}ssm_in.weight", INNER + wide + RANK, WIDTH)
    out.vector(f"{at}ssm_conv1d.weight", wide, KERNEL, around=0.3)
    out.vector(f"{at}ssm_conv1d.bias", wide, around=0.0)
    out.vector(f"{at}ssm_dt.bias", RANK, around=0.0)
    out.file.add_tensor(f"{at}ssm_a", -np.linspace(0.5, 2, RANK, dtype=np.float32)[:, None])
    out.vector(f"{at}ssm_d", RANK, 1)
    out.vector(f"{at}ssm_norm.weight", GROUPS, INNER // GROUPS)
    out.matrix(f"{at}ssm_out.weight", WIDTH, INNER)
