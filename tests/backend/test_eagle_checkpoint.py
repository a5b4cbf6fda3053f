"""EAGLE heads as users have them: of every format, broken, or made for another target."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncspec.plugins.hf.heads.eagle.checkpoint import EagleCheckpoint, open_eagle
from asyncspec.plugins.hf.heads.eagle.geometry import check_head
from asyncspec.plugins.hf.heads.eagle.head import load_head
from asyncspec.plugins.hf.heads.eagle.source import load_eagle
from backend.eagle_growth import extend, grow
from backend.eagle_heads import (
    HIDDEN,
    TARGET,
    Sizes,
    State,
    eagle,
    eagle3,
    save,
    save_pickled,
    save_speculators,
)
from backend.tiny import VOCAB

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
PROPOSES = list(range(3, 93))
REDUCED: dict[str, Any] = {"draft_vocab_size": 90}


@pytest.fixture
def target(tiny: MakeTiny) -> Checkpoint:
    return open_checkpoint(tiny("llama", **TARGET))


@pytest.fixture
def opened(target: Checkpoint, tmp_path: Path) -> Callable[..., EagleCheckpoint]:
    """Saves a head, each in a directory of its own, and opens it."""
    numbers = count()

    def make(state: State, sizes: Sizes | None = None, **settings: Any) -> EagleCheckpoint:
        head = save(tmp_path / f"head-{next(numbers)}", state, sizes, **settings)
        return open_eagle(head, target.info)

    return make


Opened = Callable[..., EagleCheckpoint]


def test_what_a_head_reads_of_its_target(opened: Opened, tiny: MakeTiny, tmp_path: Path) -> None:
    first = opened(eagle()).description
    assert (first.kind, first.features.depths, first.features.width) == ("EAGLE", (), HIDDEN)
    third = opened(eagle3()).description
    assert (third.kind, third.features.depths) == ("EAGLE-3", (2, 4, 5))
    assert third.features.width == 3 * HIDDEN
    deep = open_checkpoint(tiny("llama", num_hidden_layers=12)).info
    head = save(tmp_path / "head", eagle3())
    assert open_eagle(head, deep).description.features.depths == (2, 6, 9)


@pytest.mark.parametrize(
    ("settings", "depths"),
    [
        # Layers whose output is read, and layers whose input is: the same depths.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, (2, 4, 8)),
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 4, 5)),
    ],
)
def test_feature_depths_can_be_set(
    opened: Opened, settings: dict[str, Any], depths: tuple[int, ...]
) -> None:
    assert opened(eagle3(), **settings).description.features.depths == depths


def test_names_of_other_programs(opened: Opened, target: Checkpoint) -> None:
    """Some number the layer, and keep a prefix and leftovers."""
    renamed = {
        name.replace("midlayer.", "layers.0."): t
        for name, t in eagle3(proposes=PROPOSES, embed=True).items()
    }
    checkpoint = opened(renamed, **REDUCED)
    assert checkpoint.description.kind == "EAGLE-3"
    prefixed = {f"model.{name}": tensor for name, tensor in eagle().items()}
    prefixed["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    prefixed["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    assert "lm_head.weight" not in opened(prefixed).tensors
    load_head(checkpoint, target)


def test_speculators_nest_the_settings_of_layers(target: Checkpoint, tmp_path: Path) -> None:
    layer = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    state = eagle3() | {"verifier_norm.weight": torch.ones(HIDDEN)}
    head = save_speculators(tmp_path / "head", state, layer=layer)
    description = open_eagle(head, target.info).description
    assert description.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert description.features.depths == (2, 4, 5)


def test_the_list_of_depths_may_end_with_what_was_trained_for(
    target: Checkpoint, tmp_path: Path
) -> None:
    for depths, want in ((3, (2, 4, 5)), (4, (2, 4, 5, 8))):
        ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}
        head = save_speculators(tmp_path / f"head-{depths}", eagle3(depths=depths), **ids)
        assert open_eagle(head, target.info).description.features.depths == want


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speculators_model_type": "medusa"}, "speculators_model_type 'medusa' is not supported"),
        ({"transformer_layer_config": []}, r"transformer_layer_config is \[\], expected an object"),
        ({"transformer_layer_config": None}, "missing setting: hidden_size"),
        ({"layer": {"model_type": "qwen3_next"}}, "layers of model_type 'qwen3_next'"),
        ({"layer": {"model_type": "qwen3"}}, "no tensor layers.0.self_attn.q_norm.weight"),
        ({"layer": {"num_hidden_layers": 2}}, "no tensor layers.1.self_attn.q_proj.weight"),
        ({"layer": {"layer_types": ["sliding_attention"]}}, "only full attention"),
        ({"layer": {"hidden_size": 32}}, r"hidden size of 32 \(org/tiny-llama\), but the target"),
        ({"layer": {"vocab_size": 99}}, r"vocabulary of 99 \(org/tiny-llama\), but the target"),
        ({"fc_norm": True}, "no tensor fc_norm.0.weight"),
        ({"norm_before_fc": True}, r"no tensor input_norm.weight \(expected shape \[192\]\)"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"layernorms": True}, "layernorms is not supported"),
        ({"draft_vocab_size": 90}, r"no tensor d2t \(expected shape \[90\]\)"),
    ],
)
def test_wrong_settings_of_speculators(
    target: Checkpoint, tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    head = save_speculators(tmp_path / "head", eagle3(), **settings)
    refused(lambda: open_eagle(head, target.info), says)


def test_a_head_of_another_architecture(target: Checkpoint, tmp_path: Path) -> None:
    verifier = {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"}
    config = {"speculators_config": {"verifier": verifier}}
    head = save_speculators(tmp_path / "head", eagle3(), **config)
    says = r"made for a Qwen3ForCausalLM \(Qwen/Qwen3-8B\), but the target is a LlamaForCausalLM"
    refused(lambda: open_eagle(head, target.info), says)
    # Without torch, and also where the weights cannot be looked through.
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    refused(lambda: check_head(head, target.info), says)
    unnamed: dict[str, Any] = {"architectures": [], "name_or_path": None}
    for silent in ({}, {"verifier": unnamed}):
        head = save_speculators(tmp_path / "silent", eagle3(), speculators_config=silent)
        open_eagle(head, target.info)


def test_dtypes(target: Checkpoint, opened: Opened, tiny: MakeTiny) -> None:
    half_precision = opened({name: tensor.half() for name, tensor in eagle().items()})
    assert load_head(half_precision, target).dtype == torch.float32
    assert load_head(half_precision, target, "bfloat16").dtype == torch.bfloat16
    coarse = open_checkpoint(tiny("llama", **TARGET, dtype=torch.bfloat16))
    assert load_head(half_precision, coarse).dtype == torch.bfloat16
    with pytest.raises(UserError, match="unknown dtype"):
        load_head(half_precision, target, "int4")


def test_a_target_with_one_matrix_for_both_ends(tiny: MakeTiny, tmp_path: Path) -> None:
    tied = open_checkpoint(tiny("llama-tied", **TARGET))
    source = load_eagle(save(tmp_path / "head", eagle(embed=False)), tied)
    extend(source, torch.ones(2, HIDDEN), [1, 2])
    assert grow(source, 2, 2, 2)[1]


def test_without_the_targets_matrices(target: Checkpoint, opened: Opened) -> None:
    import msgspec

    poor = msgspec.structs.replace(target, tensors={})
    with pytest.raises(CheckpointError, match=r"has no tensor lm_head.weight"):
        load_head(opened(eagle()), poor)
    with pytest.raises(CheckpointError, match=r"has no tensor model.embed_tokens.weight"):
        load_head(opened(eagle3()), poor)


def without(name: str) -> Callable[[State], None]:
    return lambda state: state.__delitem__(name)


def shaped(name: str, *shape: int) -> Callable[[State], None]:
    return lambda state: state.__setitem__(name, torch.zeros(shape))


def moved(name: str, at: int, by: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[name][at] += by

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("fc.weight"), r"no tensor fc.weight \(expected shape \[64, 128\]\)"),
        (without("layers.0.mlp.up_proj.weight"), r"no tensor layers.0.mlp.up_proj.weight"),
        (
            shaped("fc.weight", HIDDEN, HIDDEN),
            r"tensor fc.weight .* shape \[64, 64\], expected \[64, 128\]",
        ),
        (
            shaped("layers.0.self_attn.k_proj.weight", 64, 64),
            r"k_proj.weight .* shape \[64, 64\], expected \[32, 64\]",
        ),
        (
            shaped("layers.0.self_attn.q_proj.weight", 32, 64),
            r"q_proj.weight .* shape \[32, 64\], expected \[64, 64\]",
        ),
        (shaped("embed_tokens.weight", VOCAB + 1, HIDDEN), r"embed_tokens.weight .* \[161, 64\]"),
        (shaped("layers.0.self_attn.q_proj.bias", 64), r"no tensor layers.0.self_attn.k_proj.bias"),
        (shaped("layers.1.mlp.up_proj.weight", 9, 9), r"a tensor layers.1.mlp.up_proj.weight that"),
        (shaped("layers.0.input_layernorm.weight", HIDDEN), r"layers.0.input_layernorm.weight"),
        (shaped("gate.weight", 1), r"a tensor gate.weight that its config.json says nothing of"),
        (State.clear, r"no tensor fc.weight"),
        (shaped("model.fc.weight", HIDDEN), r"has (model\.)?fc.weight twice"),
        (shaped("layers.0.mlp.experts.0.up_proj.weight", 9), "has experts, which is not"),
        (shaped("layers.0.self_attn.kv_a_proj_with_mqa.weight", 9), "has latent attention"),
    ],
)
def test_wrong_tensors_of_eagle(opened: Opened, change: Callable[[State], None], says: str) -> None:
    state = eagle()
    change(state)
    refused(lambda: opened(state), says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("norm.weight"), r"EAGLE-3 .* no tensor norm.weight"),
        (without("midlayer.hidden_norm.weight"), r"no tensor midlayer.hidden_norm.weight"),
        (without("d2t"), r"no tensor d2t \(expected shape \[90\]\)"),
        (shaped("lm_head.weight", VOCAB, HIDDEN), r"lm_head.weight .* expected \[90, 64\]"),
        (shaped("fc.weight", HIDDEN, HIDDEN), r"fc.weight .* expected \[64, 192\]"),
        (shaped("fc_norm.0.weight", HIDDEN), r"a tensor fc_norm.0.weight that"),
        (shaped("input_norm.weight", 3 * HIDDEN), r"a tensor input_norm.weight that"),
        (shaped("midlayer.self_attn.q_norm.weight", 16), r"no tensor midlayer.self_attn.k_norm"),
        (moved("d2t", 89, VOCAB), r"d2t .* sends draft token 89 to 252 .* vocabulary of 160"),
        (moved("d2t", 0, -9), r"d2t .* sends draft token 0 to -6"),
        (moved("d2t", 1, 1), r"d2t .* two draft tokens to one"),
        (moved("d2t", 89, 1), r"d2t and t2d .* name different tokens"),
        (shaped("d2t", 90), r"tensor d2t .* fractions, expected whole numbers"),
    ],
)
@pytest.mark.parametrize("keep", [save, save_pickled])
def test_wrong_tensors_of_eagle3(
    target: Checkpoint,
    tmp_path: Path,
    keep: Callable[..., Path],
    change: Callable[[State], None],
    says: str,
) -> None:
    state = eagle3(proposes=PROPOSES)
    change(state)
    head = keep(tmp_path / "head", state, **REDUCED)
    refused(lambda: open_eagle(head, target.info), says)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hidden_size": 32}, "target with a hidden size of 32, but the target's is 64"),
        ({"vocab_size": 99}, "target with a vocabulary of 99, but the target's is 160"),
        ({"hidden_size": None}, "missing setting: hidden_size"),
        ({"intermediate_size": "big"}, "intermediate_size: expected int, got str"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected int >= 1"),
        ({"num_key_value_heads": 3}, "3 key-value heads do not divide 4 heads"),
        ({"head_dim": 15}, "15 columns"),
        ({"head_dim": 8}, r"q_proj.weight .* shape \[64, 64\], expected \[32, 64\]"),
        ({"num_hidden_layers": 2}, "no tensor layers.1.self_attn.q_proj.weight"),
        ({"quantization_config": {"bits": 4}}, "its weights are quantised"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected int <= 128"),
        ({"use_sliding_window": True, "sliding_window": 512}, "only full attention"),
        ({"logit_scale": 0.5}, "logit_scale is not supported"),
        ({"partial_rotary_factor": 2}, "partial_rotary_factor: expected float <= 1"),
        ({"partial_rotary_factor": 0.2}, "3 columns cannot be rotated"),
        ({"eagle_config": 1}, "eagle_config is 1, expected an object"),
        ({"architectures": 1}, "architectures is 1, expected a list"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list"),
        ({"norm_output": True}, "its norms are those of EAGLE-3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: expected float > 0"),
        ({"rope_theta": "10000"}, "rope_theta: expected float, got str"),
        ({"rope_scaling": {"rope_theta": 0}}, "rope_theta: expected float > 0"),
        ({"rope_scaling": None, "rope_theta": -1}, "rope_theta: expected float > 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "RoPE scaling 'dynamic'"),
        ({"rope_scaling": 2}, "rope_scaling: expected object, got int"),
        ({"hidden_act": 3}, "hidden_act: expected str, got int"),
        ({"bias": True}, "no tensor fc.bias"),
        ({"qkv_bias": True}, "no tensor layers.0.self_attn.q_proj.bias"),
    ],
)
def test_wrong_settings(opened: Opened, settings: dict[str, Any], says: str) -> None:
    refused(lambda: opened(eagle(fc_bias=False), **settings), says)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target_hidden_size": 128}, "a hidden size of 128, but the target's is 64"),
        ({"norm_before_fc": True}, "no tensor input_norm.weight"),
        ({"fc_norm": True}, "no tensor fc_norm.0.weight"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"\[2, 4, 9\], but .* 8 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 4, 2]}, "expected ascending"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "layer_ids: expected array"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5]}, r"fc.weight .* expected \[64, 128\]"),
    ],
)
def test_wrong_settings_of_eagle3(opened: Opened, settings: dict[str, Any], says: str) -> None:
    refused(lambda: opened(eagle3(), **settings), says)


def test_a_narrow_head_needs_an_embedding_of_its_own(opened: Opened) -> None:
    narrow = Sizes(hidden=32, head_dim=8)
    opened(eagle3(narrow, embed=True), narrow, target_hidden_size=HIDDEN)
    refused(
        lambda: opened(eagle3(narrow), narrow, target_hidden_size=HIDDEN),
        "no tensor embed_tokens.weight, and its hidden size 32 is not the target's 64",
    )


def test_a_target_of_few_layers(tiny: MakeTiny, tmp_path: Path) -> None:
    shallow = open_checkpoint(tiny("llama")).info
    refused(lambda: open_eagle(save(tmp_path / "head", eagle3()), shallow), "5 layers are too few")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hidden_act": "swish9"}, "hidden_act 'swish9' is unknown"),
        ({"rope_scaling": {"type": "llama3"}}, "rope_scaling is incomplete"),
    ],
)
def test_settings_transformers_knows_better(
    opened: Opened, target: Checkpoint, settings: dict[str, Any], says: str
) -> None:
    refused(lambda: load_head(opened(eagle(), **settings), target), says)


def no_settings(head: Path) -> None:
    (head / "config.json").unlink()


def no_weights(head: Path) -> None:
    (head / "model.safetensors").unlink()


def cut_off(head: Path) -> None:
    file = head / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def garbage(head: Path) -> None:
    (head / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"x" * 64)


def garbage_pickle(head: Path) -> None:
    no_weights(head)
    (head / "pytorch_model.bin").write_bytes(b"not a pickle")


def cut_off_pickle(head: Path) -> None:
    no_weights(head)
    file = save_pickled(head, eagle()) / "pytorch_model.bin"
    os.truncate(file, file.stat().st_size // 2)


class _Program:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (self.file,)


def pickled_program(head: Path) -> None:
    no_weights(head)
    program = {"fc.weight": _Program(str(head / "ran"))}
    (head / "pytorch_model.bin").write_bytes(pickle.dumps(program))
    torch.save(program, head / "pytorch_model.bin")


def pickled_list(head: Path) -> None:
    no_weights(head)
    torch.save([torch.zeros(1)], head / "pytorch_model.bin")


def not_finite(head: Path) -> None:
    state = eagle()
    state["fc.weight"][3, 3] = torch.nan
    save(head, state)


def not_finite_pickle(head: Path) -> None:
    no_weights(head)
    state = eagle()
    state["layers.0.self_attn.q_proj.weight"][0, 0] = torch.inf
    save_pickled(head, state)


def quantised_pickle(head: Path) -> None:
    no_weights(head)
    save_pickled(head, {name: tensor.to(torch.int8) for name, tensor in eagle().items()})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (no_settings, "has no config.json"),
        (no_weights, "neither"),
        (cut_off, "cut off before tensor"),
        (garbage, "cannot be read"),
        (garbage_pickle, "pytorch_model.bin cannot be read"),
        (cut_off_pickle, "pytorch_model.bin cannot be read"),
        (pickled_program, "pytorch_model.bin cannot be read"),
        (pickled_list, "something else than named tensors"),
        (quantised_pickle, "torch.int8 weights"),
        (not_finite, "tensor fc.weight of .* holds NaN or infinite numbers"),
        (not_finite_pickle, "q_proj.weight of .* holds NaN or infinite numbers"),
    ],
)
def test_broken_files(
    target: Checkpoint, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    head = save(tmp_path / "head", eagle())
    damage(head)
    refused(lambda: load_eagle(head, target), says)
    assert not (head / "ran").exists()


def test_old_and_split_pickles(target: Checkpoint, tmp_path: Path) -> None:
    head = save_pickled(tmp_path / "head", {})
    (head / "pytorch_model.bin").unlink()
    items = list(eagle().items())
    for i, part in enumerate((items[:4], items[4:])):
        file = head / f"pytorch_model-0000{i}-of-00002.bin"
        torch.save(dict(part), file, _use_new_zipfile_serialization=False)
    load_eagle(head, target)


def test_no_such_head(target: Checkpoint) -> None:
    refused(lambda: open_eagle("/no/such/head", target.info), "no directory")


def test_hub_heads_may_be_pickled(
    target: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], **_: object) -> str:
        asked.extend(allow_patterns)
        return str(save_pickled(tmp_path / "head", eagle()))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_eagle("some/head", target.info).description.kind == "EAGLE"
    assert "pytorch_model*.bin" in asked


def refused(action: Callable[[], object], says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        action()
    assert "\n" not in str(caught.value)


def test_opening_leaves_the_files_alone(opened: Opened, tmp_path: Path) -> None:
    opened(eagle())
    assert sorted(p.name for p in (tmp_path / "head-0").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "head-0" / "config.json").read_text())["hidden_size"] == HIDDEN
