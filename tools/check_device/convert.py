"""Checkpoints of the Llama family as GGUF files, such as the bundled models."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from asyncspec.core.errors import UserError
from asyncspec.plugins.llama.library import bindings, last_error
from tools.check_device.file_types import FILE_TYPES


def convert(source: Path, path: Path, kind: str = "F16", template: str | None = None) -> Path:
    """A checkpoint of the Llama family with its byte-level tokenizer, where it has one.
    ``template``: for chats."""
    config = json.loads((source / "config.json").read_text())
    file = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    file.add_block_count(config["num_hidden_layers"])
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads)
    file.add_key_length(head)
    file.add_value_length(head)
    file.add_rope_dimension_count(head)
    file.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_vocab_size(config["vocab_size"])
    tokenizer = source / "tokenizer.json"
    if tokenizer.is_file():
        add_vocabulary(file, json.loads(tokenizer.read_text()), config)
    else:
        file.add_tokenizer_model("no_vocab")
    if template is not None:
        file.add_chat_template(template)
    weights: dict[str, Any] = {}
    for part in sorted(source.glob("model*.safetensors")):
        with safe_open(part, "pt") as tensors:
            weights |= {name: tensors.get_tensor(name).float().numpy() for name in tensors.keys()}  # noqa: SIM118

    def turned(values: Any, count: int) -> Any:
        """Rows as llama.cpp's rotary embedding pairs them."""
        return values.reshape(count, 2, head // 2, -1).swapaxes(1, 2).reshape(values.shape)

    add_matrix(file, "token_embd.weight", weights["model.embed_tokens.weight"], kind)
    file.add_tensor("output_norm.weight", weights["model.norm.weight"])
    if not config["tie_word_embeddings"]:
        add_matrix(file, "output.weight", weights["lm_head.weight"], kind)
    for layer in range(config["num_hidden_layers"]):
        names = {
            "attn_q": ("self_attn.q_proj", heads),
            "attn_k": ("self_attn.k_proj", kv_heads),
            "attn_v": ("self_attn.v_proj", 0),
            "attn_output": ("self_attn.o_proj", 0),
            "ffn_gate": ("mlp.gate_proj", 0),
            "ffn_up": ("mlp.up_proj", 0),
            "ffn_down": ("mlp.down_proj", 0),
        }
        at = f"model.layers.{layer}."
        for ours, theirs in (("attn_norm", "input"), ("ffn_norm", "post_attention")):
            file.add_tensor(f"blk.{layer}.{ours}.weight", weights[f"{at}{theirs}_layernorm.weight"])
        for ours, (theirs, count) in names.items():
            values = weights[f"{at}{theirs}.weight"]
            values = np.ascontiguousarray(turned(values, count) if count else values)
            fits = kind in ("F32", "F16") or values.shape[1] % 32 == 0
            add_matrix(file, f"blk.{layer}.{ours}.weight", values, kind if fits else "F16")
    finish(file)
    return path


def quantise(source: Path, path: Path, kind: str) -> Path:
    """A model in a type of ``FILE_TYPES``, by llama.cpp."""
    bound = bindings()
    parameters = bound.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[kind], 1
    names = str(source).encode(), str(path).encode()
    if bound.llama_model_quantize(*names, ctypes.byref(parameters)):
        raise UserError(f"llama.cpp cannot quantise {source}: {last_error()}")
    return path


def add_vocabulary(file: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    tokens = [""] * config["vocab_size"]
    for text, token in tokenizer["model"]["vocab"].items():
        tokens[token] = text
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = [
        one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]
    ]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")  # digits one by one, then GPT-2's words
    file.add_token_list(tokens)
    file.add_token_types(kinds)
    file.add_token_merges(merges)
    file.add_bos_token_id(config["bos_token_id"])
    file.add_eos_token_id(config["eos_token_id"])
    file.add_add_bos_token(True)


def add_matrix(file: Any, name: str, values: Any, kind: str) -> None:
    """A tensor in a type that ``gguf`` can write; Q8_0 where its rows do not fit the blocks."""
    if kind == "F32":
        file.add_tensor(name, values)
    elif kind == "F16":
        file.add_tensor(name, values.astype(np.float16))
    else:
        type_ = gguf.GGMLQuantizationType[kind]
        file.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)


def finish(file: Any) -> None:
    """Write all of it."""
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
