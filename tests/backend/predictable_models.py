"""A tiny target whose next token hangs mostly on the last one, and sources that know as much.

What random weights say nobody can guess. Here every layer adds little to the residual stream, so a
model of the embedding alone is right about as often as a real draft, and what the layers add (that
is: attention, hence slots, masks and positions) still decides the other half of the tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from backend import block_heads, eagle_heads
from backend.eagle_heads import HIDDEN, Sizes, State
from backend.tiny import save_tiny

VOCAB = 96
LAYERS = 5
TARGET: dict[str, Any] = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB}

WEIGHTS = "model.safetensors"
# How much a layer adds to the residual stream, compared with a random model of tiny.py.
SAYS = 0.12
# How sharp the distributions are.
SHARP = 3.0
# What there is to an EAGLE head beside the embedding of the last token.
REST = 0.15
# Queries that match their own key this strongly see hardly anything else.
SELF = 2.0


def save_target(directory: Path) -> Path:
    """The target, in float32."""
    save_tiny(directory, "llama", **TARGET)
    state = load_file(directory / WEIGHTS)
    for name in state:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] *= SAYS
    state["lm_head.weight"] *= SHARP
    save_file(state, directory / WEIGHTS, {"format": "pt"})
    return directory


def save_draft(directory: Path, target: Path) -> Path:
    """The target's first layer as a model of its own."""
    directory.mkdir()
    for file in target.glob("*.json"):
        shutil.copy(file, directory)
    config = json.loads((target / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    state = {
        name: tensor
        for name, tensor in load_file(target / WEIGHTS).items()
        if ".layers." not in name or ".layers.0." in name
    }
    save_file(state, directory / WEIGHTS, {"format": "pt"})
    return directory


def save_eagle(directory: Path, target: Path) -> Path:
    """EAGLE-1/2: the guessed feature is the last token's embedding, normed as the target does."""
    sizes = Sizes(vocab=VOCAB)
    state = _quiet(eagle_heads.eagle(sizes, fc_bias=False, embed=False))
    norm = load_file(target / WEIGHTS)["model.norm.weight"]
    state["fc.weight"][:, :HIDDEN] += torch.diag(norm)
    return eagle_heads.save(directory, state, sizes)


def save_eagle3(directory: Path, target: Path) -> Path:
    """EAGLE-3: attention carries the last token's embedding into the guess."""
    sizes = Sizes(vocab=VOCAB, kv_heads=eagle_heads.HEADS)
    state = _quiet(eagle_heads.eagle3(sizes))
    weights = load_file(target / WEIGHTS)
    token = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    for name, gain in (("q", SELF), ("k", SELF), ("v", 1.0)):
        state[f"midlayer.self_attn.{name}_proj.weight"] = token * gain
    state["midlayer.self_attn.o_proj.weight"] += torch.eye(HIDDEN)
    state["norm.weight"] = weights["model.norm.weight"]
    state["lm_head.weight"] = weights["lm_head.weight"]
    # After the first, second and last but one layer of five.
    return eagle_heads.save(directory, state, sizes, eagle_aux_hidden_state_layer_ids=[1, 2, 4])


def save_mtp(directory: Path, target: Path) -> Path:
    """The target with a next-token layer, whose state is mostly the last token's embedding."""
    shutil.copytree(target, directory)
    state, extra = load_file(target / WEIGHTS), f"model.layers.{LAYERS}."
    last = {n: t for n, t in state.items() if n.startswith(f"model.layers.{LAYERS - 1}.")}
    state |= {extra + name.split(".", 3)[3]: tensor.clone() for name, tensor in last.items()}
    state |= {f"{extra}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm")}
    state[f"{extra}shared_head.norm.weight"] = state["model.norm.weight"].clone()
    joined = torch.cat([torch.eye(HIDDEN), REST * torch.eye(HIDDEN)], dim=1)
    state[f"{extra}eh_proj.weight"] = joined
    save_file(state, directory / WEIGHTS, {"format": "pt"})
    return directory


def save_dflash(directory: Path, target: Path) -> Path:
    """DFlash: rows of a block see its first token, whose embedding attention carries to them."""
    sizes = Sizes(vocab=VOCAB, kv_heads=eagle_heads.HEADS)
    state = _quiet(block_heads.dflash(sizes))
    weights = load_file(target / WEIGHTS)
    for name, gain in (("v", SELF), ("o", SELF)):
        state[f"layers.0.self_attn.{name}_proj.weight"] += gain * torch.eye(HIDDEN)
    state["fc.weight"] *= 0.0
    state["hidden_norm.weight"] *= 0.0
    state["norm.weight"] = weights["model.norm.weight"]
    return block_heads.save_zlab(
        directory,
        state,
        sizes,
        # After the first, second and last but one layer of five.
        dflash_config={"mask_token_id": block_heads.MASK, "target_layer_ids": [0, 1, 3]},
    )


def _quiet(state: State) -> State:
    """All that is random is only a part of what a head says."""
    return {name: tensor * REST if tensor.dim() > 1 else tensor for name, tensor in state.items()}
