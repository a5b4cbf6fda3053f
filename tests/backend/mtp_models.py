"""Random checkpoints with next-token layers in every published layout, and the layer without a
cache: every path computed from its first row by transformers' own model of one layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm
from transformers import AutoConfig, AutoModelForCausalLM

from asyncspec.core.tree import Grown, Shape
from asyncspec.source.expand import Proposal, beam, path_grower
from backend.eagle_heads import Dice
from backend.tiny import save_tiny

LAYERS = 3
WEIGHTS = "model.safetensors"
EXTRA = f"model.layers.{LAYERS}."

_MIMO = "model.mtp_layers.0."
# By layout: the layer, and norm of token, norm of state, join, last norm.
NAMES: dict[str, tuple[str, list[str]]] = {
    "deepseek": (EXTRA, [EXTRA + x for x in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]),
    "qwen": (
        "mtp.layers.0.",
        ["mtp." + x for x in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")],
    ),
    "mimo": (
        _MIMO,
        [
            _MIMO + x
            for x in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ],
    ),
}


def save_mtp(directory: Path, layout: str, family: str = "qwen3", **changes: Any) -> Path:
    """A target whose last layer of ``LAYERS`` + 1 became its next-token layer."""
    save_tiny(directory, family, num_hidden_layers=LAYERS + 1, **changes)
    dice, state = Dice(5), load_file(directory / WEIGHTS)
    layer, parts = NAMES[layout]
    renamed = {
        layer + name.removeprefix(EXTRA) if name.startswith(EXTRA) else name: tensor
        for name, tensor in state.items()
    }
    token_norm, state_norm, join, norm = (f"{name}.weight" for name in parts)
    hidden = len(state["model.norm.weight"])
    renamed |= {name: dice.scale(hidden) for name in (token_norm, state_norm, norm)}
    renamed[join] = dice.matrix(hidden, 2 * hidden)
    if layout == "deepseek":
        # Copies of the target's own, as DeepSeek saves them.
        renamed[f"{EXTRA}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        renamed[f"{EXTRA}shared_head.head.weight"] = dice.matrix(4, 4)
    save_file(renamed, directory / WEIGHTS, {"format": "pt"})
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"num_hidden_layers": LAYERS}
    for name, value in config.items():
        if isinstance(value, list) and len(value) == LAYERS + 1:
            config[name] = value[:LAYERS]
    config["num_nextn_predict_layers"] = 1
    file.write_text(json.dumps(config))
    return directory


class PlainMTP:
    """The next-token layer of ``save_mtp``."""

    def __init__(self, directory: Path, layout: str, *, from_one: bool = False) -> None:
        """``from_one``: the family's norms multiply by 1 + weight."""
        self.shift = float(from_one)
        state = load_file(directory / WEIGHTS)
        layer, parts = NAMES[layout]
        self.token_norm, self.state_norm, self.join, norm = (state[f"{x}.weight"] for x in parts)
        self.state_first = layout == "mimo"
        config: Any = AutoConfig.from_pretrained(directory)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"]
        # In a model of one layer that has experts.
        config.decoder_sparse_step, config.first_k_dense_replace = 1, 0
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = ["sparse"]
        self.epsilon = config.rms_norm_eps
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=torch.float32
        )
        own = {
            f"model.layers.0.{name.removeprefix(layer)}": tensor
            for name, tensor in state.items()
            if name.startswith(layer)
        }
        stacked = self.model.state_dict()
        for name in stacked:
            if ".experts." in name:
                own[name] = _stack(name, own, len(stacked[name]))
        own["model.norm.weight"] = norm
        missing = self.model.load_state_dict(own, strict=False).missing_keys
        assert not [name for name in missing if "layers" in name]
        self.embedding = state["model.embed_tokens.weight"]
        self.lm_head = state.get("lm_head.weight", self.embedding)

    def log_probs(
        self, features: torch.Tensor, tokens: Sequence[int], path: Sequence[int]
    ) -> torch.Tensor:
        """After ``path``, which follows ``tokens``; ``features`` [n, H] are the target's before
        each of ``tokens``."""
        rows, seen = features, list(tokens)
        state = self.states(rows, seen)[-1]
        for token in path:
            rows, seen = torch.cat([rows, state[None]]), [*seen, token]
            state = self.states(rows, seen)[-1]
        return linear(state, self.lm_head).log_softmax(-1)

    def states(self, features: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """One full causal pass."""
        embedded = self.embedding[torch.tensor(tokens)]
        parts = [self._norm(embedded, self.token_norm), self._norm(features, self.state_norm)]
        joined = torch.cat(parts[::-1] if self.state_first else parts, -1)
        with torch.inference_mode():
            out = self.model.model(inputs_embeds=linear(joined, self.join)[None], use_cache=False)
        states: torch.Tensor = out.last_hidden_state[0]
        return states

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight + self.shift, self.epsilon)

    def grow(
        self, features: torch.Tensor, tokens: Sequence[int], depth: int, width: int, count: int
    ) -> Grown:
        """EAGLE-2's tree."""

        def successors(path: tuple[int, ...], width: int) -> Proposal:
            best = self.log_probs(features, tokens, list(path)).topk(width)
            return best.indices.tolist(), best.values.tolist()

        return beam(path_grower(successors), Shape(depth, width, count))


def _stack(name: str, state: dict[str, torch.Tensor], experts: int) -> torch.Tensor:
    """transformers' stack of an MoE layer's matrices."""
    stem, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return torch.stack(
        [
            torch.cat([state[f"{stem}.{number}.{part}.weight"] for part in parts])
            for number in range(experts)
        ]
    )
