"""Models with other code than the installed transformers has, as another release may have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.llama import modeling_llama as llama

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.model import shard as shards
from asyncspec.plugins.hf.model.shard import Shard, load_shard
from backend.fake_attention import Mixing

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
ROWS = 5


@dataclass
class OtherOutput:
    """The result of a model's body; no release calls its cache so."""

    last_hidden_state: torch.Tensor | None = None
    stored_keys: Any = None
    scale: torch.Tensor | None = None


@pytest.fixture
def other_release(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes Llama's body return ``OtherOutput``, of which its head reads every field."""
    body = llama.LlamaModel.forward

    def change(scale: float | None = None) -> None:
        def run_body(self: Any, *args: Any, **kwargs: Any) -> OtherOutput:
            hidden = body(self, *args, **kwargs).last_hidden_state
            return OtherOutput(hidden, scale=None if scale is None else hidden.new_tensor(scale))

        def run_model(
            self: Any, input_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any
        ) -> Any:
            outputs = self.model(input_ids=input_ids, **kwargs)
            assert outputs.stored_keys is None
            logits = self.lm_head(outputs.last_hidden_state[:, logits_to_keep, :])
            if outputs.scale is not None:
                logits = logits * outputs.scale
            return llama.CausalLMOutputWithPast(logits=logits)

        monkeypatch.setattr(llama.LlamaModel, "forward", run_body)
        monkeypatch.setattr(llama.LlamaForCausalLM, "forward", run_model)

    return change


def load(path: Path) -> Shard:
    checkpoint = open_checkpoint(path)
    with torch.inference_mode():
        return load_shard(
            checkpoint, 0, checkpoint.info.layers, torch.float32, "exact", KernelSettings()
        )


def logits(shard: Shard) -> torch.Tensor:
    rows = torch.arange(ROWS)
    with torch.inference_mode():
        return shard.logits(shard.probe_inputs(ROWS), rows, Mixing(ROWS), rows)


@pytest.mark.parametrize("scale", [None, 1.5])
def test_a_head_that_reads_other_fields_of_the_result_has_its_bits(
    scale: float | None,
    other_release: Callable[..., None],
    tiny: MakeTiny,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "fuse_layers", lambda *_: None)  # graphs have bits of their own
    other_release(scale)
    shard = load(tiny())
    with monkeypatch.context() as patched:
        patched.setattr(shards, "optimize_model", lambda *_: "not tried")
        own = load(tiny())
    assert torch.equal(logits(shard), logits(own))
    # A field that stands there for its default is no reason for slower layers.
    assert bool(shard.unoptimized_reason) == (scale is not None)
    assert ("transformers' own code" in shard.describe()) == (scale is not None)


def test_a_stage_says_why_its_layers_are_run_by_the_familys_code(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = llama.LlamaModel.forward

    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = body(self, *args, **kwargs)
        return llama.BaseModelOutputWithPast(last_hidden_state=out.last_hidden_state * 1.01)

    monkeypatch.setattr(llama.LlamaModel, "forward", renamed)
    assert "(results differ)" in load(tiny()).describe()


def test_a_family_that_attends_by_other_means_is_refused(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows would see other rows than those above them in the tree."""
    monkeypatch.setattr(
        llama.LlamaAttention, "forward", lambda self, hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(CheckpointError, match=r"transformers \d.*another version"):
        load(tiny())


def test_a_family_that_does_not_take_our_arguments_is_refused(
    tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.LlamaModel, "forward", lambda self, tokens: tokens)
    with pytest.raises(CheckpointError, match=r"transformers \d.*another version"):
        load(tiny())


def test_routers_that_return_logits_alone(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of DeepSeek-V3 and GLM before transformers 5.14 (DeepSeek-V3, section 2.1.2)."""
    want = logits(load(tiny("glm4-moe")))

    def score(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.flatten(0, 1).float(), self.weight.float())

    def route(self: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config, scores = self.config, logits.sigmoid()
        biased = scores + self.gate.e_score_correction_bias
        groups = biased.view(len(biased), config.n_group, -1)
        best = groups.topk(2).values.sum(-1).topk(config.topk_group).indices
        outside = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        within = groups.masked_fill(outside[..., None], -torch.inf).flatten(1)
        chosen = within.topk(config.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights * config.routed_scaling_factor

    def run(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        routed = self.experts(hidden[0], *self.route_tokens_to_experts(self.gate(hidden)))
        out: torch.Tensor = routed[None] + self.shared_experts(hidden)
        return out

    monkeypatch.setattr(glm.Glm4MoeTopkRouter, "forward", score)
    monkeypatch.setattr(glm.Glm4MoeMoE, "forward", run)
    monkeypatch.setattr(glm.Glm4MoeMoE, "route_tokens_to_experts", route, raising=False)
    torch.testing.assert_close(logits(load(tiny("glm4-moe"))), want)
