"""A trained head in speculators' layout, which vLLM and SGLang read as well, and its card."""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
from msgspec import Struct

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.trainers import Trained, Training
from asyncspec.core.errors import writing
from asyncspec.plugins.hf.training.checkpoint import State
from asyncspec.plugins.hf.training.layers import HeadShape

Kind = Literal["eagle3", "dspark"]
"""speculators' names."""


class HeadFiles(Struct, frozen=True):
    """What is written."""

    kind: Kind
    shape: HeadShape
    depths: tuple[int, ...]
    # Tokens proposed in a row.
    levels: int
    # Settings of this kind alone.
    settings: dict[str, Any]
    weights: State
    # Tokens that it proposes, ascending, and their rows of the target's output matrix.
    ids: torch.Tensor
    output: torch.Tensor

    def write(self, training: Training, trained: Trained) -> None:
        """Write ``config.json``, the weights and the card. Raises ``UserError``."""
        from safetensors.torch import save_file

        out, info = training.out, training.target.info
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in self.weights.items()}
        tensors["lm_head.weight"] = self.output.cpu().to(torch.bfloat16)
        tensors |= _tables(self.ids, info.vocab_size)
        with writing(str(out)):
            out.mkdir(parents=True, exist_ok=True)
            path = out / "model.safetensors"
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, path, metadata={"format": "pt"})
            path.chmod(0o644)  # safetensors makes it for the owner alone
            (out / "config.json").write_text(json.dumps(self._config(training), indent=2) + "\n")
            (out / "README.md").write_text(_card(self, training, trained), encoding="utf-8")

    def _config(self, training: Training) -> dict[str, Any]:
        info = training.target.info
        class_name = "Eagle3Speculator" if self.kind == "eagle3" else "DSparkSpeculator"
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": self.levels,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        # The families' names of llama.cpp are not those of architectures.
        architectures = [info.architecture] if "For" in info.architecture else []
        return {
            "architectures": [class_name],
            "speculators_model_type": self.kind,
            "draft_vocab_size": len(self.ids),
            **self.settings,
            "transformer_layer_config": _layers(self.shape, info, self.kind),
            "speculators_config": {
                "algorithm": self.kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": training.name, "architectures": architectures},
            },
            "dtype": "bfloat16",
        }


def _layers(shape: HeadShape, info: ModelInfo, kind: Kind) -> dict[str, Any]:
    """As transformers has the settings of such layers."""
    return {
        "model_type": "llama" if kind == "eagle3" else "qwen3",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "head_dim": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers,
        "max_position_embeddings": info.context_length,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": False,
        "vocab_size": info.vocab_size,
    } | ({} if kind == "eagle3" else {"layer_types": ["full_attention"] * shape.layers})


def _tables(ids: torch.Tensor, vocab: int) -> State:
    """``d2t`` and ``t2d`` of a reduced vocabulary; none of a whole one."""
    if len(ids) == vocab:
        return {}
    ids = ids.cpu()
    proposed = torch.zeros(vocab, dtype=torch.bool)
    proposed[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": proposed}


def _card(files: HeadFiles, training: Training, trained: Trained) -> str:
    name = {"eagle3": "EAGLE-3", "dspark": "DFlash (with DSpark's Markov head)"}[files.kind]
    rows = "\n".join(f"| {i} | {x:.3f} |" for i, x in enumerate(trained.agreement, start=1))
    return f"""---
base_model: {training.name}
tags:
- speculative-decoding
- speculators
---

# {name} head for {training.name}

Made by `asyncspec train-head` for this very target, of which it reads the hidden states after
layers {", ".join(map(str, files.depths))}. Its layout is speculators'.

- target: `{training.name}`, fingerprint `{training.target.fingerprint}`
- data: {training.data}; the target's own answers, greedy and at temperature 0.8
- {trained.steps} steps, seed {training.seed}; {len(files.ids):,} tokens that it can propose

On answers that it was not trained on, its best guess is the target's most likely token:

| depth | agreement |
| --- | --- |
{rows}

{trained.leading:.2f} guesses in a row are right on average.

```
asyncspec run --target {training.name} --draft eagle:{training.out.name}
```
"""
