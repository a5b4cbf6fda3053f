"""Random DFlash and DSpark heads in the published layouts, and their blocks by the formulas alone:
every block computed from all features anew, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from backend.eagle_heads import HIDDEN, Dice, Sizes, State, _layer, save, save_speculators
from backend.eagle_reference import PlainHead

ROWS = 5
MASK = 7
DEPTHS = (2, 4, 5)
RANK = 12


def dflash(
    sizes: Sizes | None = None,
    *,
    proposes: Sequence[int] | None = None,
    markov: str = "",
    confidence: bool = False,
    seed: int = 0,
) -> State:
    """Tensors of a head."""
    sizes = sizes or Sizes(layers=2)
    dice = Dice(seed)
    state = {"fc.weight": dice.matrix(sizes.hidden, len(DEPTHS) * HIDDEN)}
    for prefix in (f"layers.{i}." for i in range(sizes.layers)):
        state |= _layer(dice, sizes, prefix, sizes.hidden, bias=False, qk_norm=True)
        state[f"{prefix}input_layernorm.weight"] = dice.scale(sizes.hidden)
    state |= {f"{name}.weight": dice.scale(sizes.hidden) for name in ("hidden_norm", "norm")}
    vocab = sizes.vocab
    if proposes is not None:
        ids = torch.tensor(proposes)
        vocab = len(ids)
        state["d2t"] = ids - torch.arange(vocab)
        state["lm_head.weight"] = dice.matrix(vocab, sizes.hidden)
    if markov:
        state["markov_head.markov_w1.weight"] = dice.normal(sizes.vocab, RANK)
        state["markov_head.markov_w2.weight"] = dice.matrix(vocab, RANK)
    if markov == "gated":
        state["markov_head.gate_proj.weight"] = dice.matrix(RANK, sizes.hidden + RANK)
        state["markov_head.gate_proj.bias"] = dice.normal(RANK)
    if confidence:
        state["confidence_head.proj.weight"] = dice.matrix(1, sizes.hidden + RANK)
        state["confidence_head.proj.bias"] = dice.normal(1)
    return state


def save_zlab(directory: Path, state: State, sizes: Sizes | None = None, **settings: Any) -> Path:
    """As z-lab publishes a head: settings are flat but ``dflash_config``."""
    reported = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": ROWS,
        "num_target_layers": 8,
        # Layers whose output is read.
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [d - 1 for d in DEPTHS]},
    }
    return save(directory, state, sizes or Sizes(layers=2), **(reported | settings))


def save_block_speculators(
    directory: Path, state: State, sizes: Sizes | None = None, **settings: Any
) -> Path:
    """As speculators saves a head."""
    reported = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [*DEPTHS],
        "block_size": ROWS,
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "layer": {"model_type": "qwen3", "layer_types": ["full_attention"] * 2},
    }
    return save_speculators(directory, state, sizes or Sizes(layers=2), **(reported | settings))


class PlainBlocks:
    """A head from its tensors; ``embedding`` and ``lm_head`` are the target's."""

    def __init__(self, state: State, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self.sizes = Sizes(layers=2)
        self.plain = PlainHead(state, embedding, lm_head, self.sizes)
        self.state = self.plain.state
        self.from_anchor = False
        # By layer; 0: all of the text.
        self.windows = (0, 0)
        self.causal = True

    @property
    def levels(self) -> int:
        return ROWS if self.from_anchor else ROWS - 1

    def rows(self, features: torch.Tensor, token: int) -> torch.Tensor:
        """Of the block that begins with ``token`` at position len(features), [levels, H]."""
        fused = linear(features.to(torch.float64), self.state["fc.weight"])
        context = self._norm(fused, "hidden_norm")
        hidden = self.plain.embedding[torch.tensor([token] + [MASK] * (ROWS - 1))]
        for index in range(self.sizes.layers):
            prefix = f"layers.{index}."
            normed = self._norm(hidden, f"{prefix}input_layernorm")
            hidden = hidden + self._attention(index, context, normed)
            y = self._norm(hidden, f"{prefix}post_attention_layernorm")
            gate, up = (
                linear(y, self.state[f"{prefix}mlp.{x}_proj.weight"]) for x in ("gate", "up")
            )
            down = self.state[f"{prefix}mlp.down_proj.weight"]
            hidden = hidden + linear(torch.nn.functional.silu(gate) * up, down)
        return self._norm(hidden, "norm")[-self.levels :]

    def log_probs(self, rows: torch.Tensor, level: int, token: int) -> torch.Tensor:
        """Of the tokens of a level, behind ``token`` on the level above."""
        logits = linear(rows[level], self.plain.lm_head)
        if "markov_head.markov_w1.weight" in self.state:
            before = self.state["markov_head.markov_w1.weight"][token]
            if "markov_head.gate_proj.weight" in self.state:
                both = torch.cat([rows[level], before])
                gate = [self.state[f"markov_head.gate_proj.{x}"] for x in ("weight", "bias")]
                before = before * linear(both, *gate).sigmoid()
            logits = logits + linear(before, self.state["markov_head.markov_w2.weight"])
        return logits.log_softmax(-1)

    def best(
        self, features: torch.Tensor, token: int, depth: int, width: int, count: int
    ) -> dict[tuple[int, ...], float]:
        """The ``count`` best products of all paths with up to ``width`` children a node."""
        rows = self.rows(features, token)
        found: dict[tuple[int, ...], float] = {(): 0.0}
        frontier: dict[tuple[int, ...], float] = dict(found)
        for level in range(min(depth, self.levels)):
            grown: dict[tuple[int, ...], float] = {}
            for path, score in frontier.items():
                top = self.log_probs(rows, level, path[-1] if path else token).topk(width)
                ids = self.plain.ids[top.indices].tolist()
                for child, value in zip(ids, top.values.tolist(), strict=True):
                    grown[(*path, child)] = score + value
            found |= grown
            # Exhaustive: no node below these can be among the best.
            frontier = dict(itertools.islice(_sorted(grown).items(), count))
        del found[()]
        return dict(itertools.islice(_sorted(found).items(), count))

    def _attention(self, index: int, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before, own, width = len(context), len(x), self.sizes.head_dim
        both = torch.cat([context, x])
        query, key, value = (
            linear(rows, self.state[f"layers.{index}.self_attn.{name}_proj.weight"]).view(
                len(rows), -1, width
            )
            for name, rows in (("q", torch.cat([context, x])), ("k", both), ("v", both))
        )
        query, key = (
            self.plain._rotate(self._norm(t, f"layers.{index}.self_attn.{n}_norm"))
            for t, n in ((query, "q"), (key, "k"))
        )
        groups = self.sizes.heads // self.sizes.kv_heads
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[before:], key) * width**-0.5
        seen = torch.ones(own, before + own, dtype=torch.bool)
        if window := self.windows[index]:
            seen[:, : max(0, before - window)] = False
            if self.causal:
                seen[:, before:] = torch.ones(own, own, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        return linear(mixed, self.state[f"layers.{index}.self_attn.o_proj.weight"])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.plain._norm(x, name)


def _sorted(scores: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    return dict(sorted(scores.items(), key=lambda item: -item[1]))
