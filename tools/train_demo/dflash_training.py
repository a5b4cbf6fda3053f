"""Making a DFlash head for a target and teaching it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from .dflash import BlockSize, DFlashHead
from .tokenizer import PAD_ID

if TYPE_CHECKING:
    from .recipe import Recipe


def build_blocks(target: Any, recipe: Recipe, seed: int) -> DFlashHead:
    """A fresh head for ``target``, which shares its embedding."""
    torch.manual_seed(seed)
    config = target.config
    theta = float(config.rope_parameters["rope_theta"])
    size = BlockSize(
        recipe.dflash, recipe.block, config.vocab_size, PAD_ID, theta, config.rms_norm_eps
    )
    head = DFlashHead(size, target.model.embed_tokens.weight.detach())
    with torch.no_grad():
        # The scale of logits, which a rate for norms would take thousands of steps to reach.
        head.norm.weight.copy_(target.model.norm.weight)
    return head


@torch.no_grad()
def read_depths(
    target: Any, rows: torch.Tensor, depths: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out of the first d layers for each depth, side by side [rows, context, depths *
    hidden] and not normed, and the target's logits."""
    found: dict[int, torch.Tensor] = {}

    def keep(depth: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            found[depth] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = [target.model.layers[d - 1].register_forward_hook(keep(d)) for d in depths]
    try:
        last = target.model(input_ids=rows, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[d] for d in depths], dim=-1), target.lm_head(last)


def block_logits(
    head: DFlashHead, weight: torch.Tensor, tokens: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """Logits [..., rows, vocab] of the rows of ``blocks``, each behind the text's own token
    ``tokens`` [..., rows]."""
    logits: torch.Tensor = functional.linear(blocks, weight) + head.markov_head(tokens)
    return logits


def blocks_loss(head: DFlashHead, target: Any, rows: torch.Tensor) -> torch.Tensor:
    """KL to the target over all levels of blocks at random places, levels weighted as in DFlash
    (arXiv:2602.06036, section 4.2: a later one counts only where all before it are right)."""
    block = head.size.block
    features, wanted = read_depths(target, rows, block.depths)
    count, length = rows.shape
    places = torch.rand(count, length - block.rows - 1, device=rows.device)
    # Not the first token, before which there is no feature.
    anchors = places.topk(max(1, length // block.spacing), dim=1).indices + 1
    within = anchors[..., None] + torch.arange(block.rows, device=rows.device)
    texts = torch.arange(count, device=rows.device)[:, None, None]
    filled = head(rows, features, anchors)
    given = block_logits(head, target.lm_head.weight, rows[texts, within], filled)
    target_log = functional.log_softmax(wanted[texts, within].float(), dim=-1)
    head_log = functional.log_softmax(given.float(), dim=-1)
    each = (target_log.exp() * (target_log - head_log)).sum(-1)
    weights = torch.exp(-torch.arange(block.rows, device=rows.device) / block.decay)
    return (each * weights).sum(-1).mean() / weights.sum()
