"""Heads whose training can go on: which they are, and how they become modules again."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from asyncspec.backend.base import Learnable, sampled_parts
from asyncspec.core.errors import UserError
from asyncspec.plugins.hf.heads.eagle.checkpoint import EagleCheckpoint
from asyncspec.plugins.hf.heads.eagle.description import EMBEDDING, BlockShape, HeadDescription
from asyncspec.plugins.hf.training.dflash_head import DFlashHead
from asyncspec.plugins.hf.training.eagle3_head import Eagle3Head
from asyncspec.plugins.hf.training.layers import HeadShape

WEIGHTS = "model.safetensors"
CONFIG = "config.json"

MAKE = "asyncspec.plugins.hf.training.online:OnlineHead"

LEVELS = 5
"""Depths that an EAGLE-3 head is trained for, as by ``asyncspec train-head``."""


def learnable(opened: EagleCheckpoint) -> Learnable:
    """How an opened head goes on learning. Raises ``UserError`` where it cannot."""
    if why := refusal(opened):
        raise UserError(
            f"[draft] learn: the head {opened.path} cannot learn: {why}; take one made by "
            "asyncspec train-head, or leave learn out"
        )
    digest = hashlib.sha256((opened.path / CONFIG).read_bytes())
    weights = opened.path / WEIGHTS
    size = weights.stat().st_size
    with weights.open("rb") as stream:
        for part in sampled_parts(weights, 0, size):
            stream.seek(part.offset)
            digest.update(stream.read(part.length))
    digest.update(str(size).encode())
    return Learnable(MAKE, str(opened.path), digest.hexdigest()[:16])


def refusal(opened: EagleCheckpoint) -> str:
    """Why a head cannot go on learning; empty where it can."""
    head = opened.description
    if head.kind == "EAGLE":
        return "it is an EAGLE-1 or EAGLE-2 head"
    if not (opened.path / WEIGHTS).is_file():
        return f"it has no {WEIGHTS}"
    if EMBEDDING in opened.tensors or "lm_head.weight" not in opened.tensors:
        return "it has an embedding of its own, or no output matrix"
    if not _is_plain(head):
        return "its layers differ from those that asyncspec train-head trains"
    with torch.device("meta"):
        expected = {name: tuple(x.shape) for name, x in _module(head).state_dict().items()}
    if any(
        name not in opened.tensors or opened.tensors[name].shape != shape
        for name, shape in expected.items()
    ):
        return "its tensors differ from those that asyncspec train-head writes"
    return ""


def module_of(opened: EagleCheckpoint) -> Any:
    """A head that is not refused, in float32."""
    module = _module(opened.description)
    module.load_state_dict(
        {name: opened.tensors[name].read(torch.float32) for name in module.state_dict()}
    )
    return module


def _is_plain(head: HeadDescription) -> bool:
    block = head.block
    rope = head.rope_parameters
    extras = (
        *(head.fc_bias, head.qkv_bias, head.mlp_bias, head.norm_before_residual, head.norm_output),
        *(head.parallel, head.feature_norm != "none"),
        *(head.hidden_act != "silu", head.rotary_dim != head.head_dim),
        *(rope.get("rope_type", "default") != "default",),
        head.head_dim * head.num_attention_heads != head.hidden_size,
        head.hidden_size != head.features.depth_width,
    )
    if any(extras):
        return False
    if block is None:
        return head.num_hidden_layers == 1 and not head.qk_norm
    return head.qk_norm and _is_plain_block(block)


def _is_plain_block(block: BlockShape) -> bool:
    return block.from_anchor and block.markov == "vanilla" and not any(block.windows)


def _module(head: HeadDescription) -> Eagle3Head | DFlashHead:
    shape = HeadShape(
        head.hidden_size,
        head.num_attention_heads,
        head.num_key_value_heads,
        head.intermediate_size,
        head.num_hidden_layers,
        float(head.rope_parameters["rope_theta"]),
        head.rms_norm_eps,
    )
    if (block := head.block) is None:
        return Eagle3Head(shape, head.features.width, LEVELS)
    return DFlashHead(
        shape,
        head.features.width,
        block.rows,
        vocab=(head.vocab_size, head.draft_vocab_size),
        mask_token=block.mask_token,
        markov_rank=block.markov_rank,
    )
