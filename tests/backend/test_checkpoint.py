"""Checkpoints as users have them: whole, sharded, broken, or of a kind that cannot work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncspec.backend.draft_vocabulary import differing_tokens
from asyncspec.backend.reference import decode
from asyncspec.core.errors import CheckpointError, ClusterError, UserError
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint, resolve_dtype
from asyncspec.plugins.hf.checkpoint.files.hub import locate
from asyncspec.plugins.hf.checkpoint.model_config import inspect_checkpoint
from asyncspec.plugins.hf.checkpoint.tokenizer import (
    load_tokenizer,
    token_ids,
)
from asyncspec.plugins.hf.model.stage import load_stage
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from backend.probe import cut
from backend.tiny import LAYERS, VOCAB, generated

pytestmark = pytest.mark.torch

PROMPT = [5, 9, 77, 31]
MakeTiny = Callable[..., Path]


@pytest.fixture
def mine(tiny: MakeTiny, tmp_path: Path) -> Path:
    """A checkpoint of one's own, to break."""
    return shutil.copytree(tiny("llama"), tmp_path / "model")


@pytest.fixture
def sharded(tiny: MakeTiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny("llama", max_shard_size="150KB"), tmp_path / "sharded")


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | changes))


def test_facts(tiny: MakeTiny) -> None:
    model_info = inspect_checkpoint(tiny("qwen3"))
    assert (model_info.architecture, model_info.layers, model_info.hidden_size) == (
        "Qwen3ForCausalLM",
        LAYERS,
        64,
    )
    assert (model_info.vocab_size, model_info.context_length, model_info.dtype) == (
        VOCAB,
        512,
        "float32",
    )
    assert model_info.eos_token_ids == (2,)


def test_inspecting_needs_no_torch(mine: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from asyncspec.backend import draft_trie\n"
        "from asyncspec.plugins.hf import backend\n"
        "from asyncspec.plugins.hf.kernels import process\n"
        "from asyncspec.plugins.hf.checkpoint.files import headers\n"
        f"backend.BACKEND.inspect({str(mine)!r})\n"
        f"headers.list_tensors(Path({str(mine)!r}))\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_settings_as_python_writes_them(mine: Path) -> None:
    """Infinity, which is no JSON, stands in the settings of many Mamba-2 models."""
    edit(mine / "config.json", time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (mine / "config.json").read_text()
    assert open_checkpoint(mine).info.layers == LAYERS


def test_end_of_answer(mine: Path) -> None:
    (mine / "generation_config.json").unlink(missing_ok=True)
    assert inspect_checkpoint(mine).eos_token_ids == (2,)
    edit(mine / "generation_config.json", eos_token_id=[7, 9])
    assert inspect_checkpoint(mine).eos_token_ids == (7, 9)
    edit(mine / "generation_config.json", eos_token_id=None)
    edit(mine / "config.json", eos_token_id=None)
    assert inspect_checkpoint(mine).eos_token_ids == ()
    tokenizer(mine, {"a": 0, "</s>": 5})
    for name in ("</s>", {"content": "</s>"}):
        edit(mine / "tokenizer_config.json", eos_token=name)
        assert inspect_checkpoint(mine).eos_token_ids == (5,)
    edit(mine / "config.json", eos_token_id="</s>")
    with pytest.raises(CheckpointError, match="eos_token_id"):
        inspect_checkpoint(mine)


@pytest.mark.parametrize(
    ("family", "name", "outside", "inside", "ends"),
    [
        ("qwen3.5", "Qwen3_5ForConditionalGeneration", 7, None, (7,)),
        ("gemma3", "Gemma3ForConditionalGeneration", [1, 106], 1, (1, 106)),
        ("gemma3", "Gemma3ForConditionalGeneration", None, 1, (1,)),
    ],
)
def test_what_ends_an_answer_stands_outside_the_language_models_settings(
    family: str,
    name: str,
    outside: Any,
    inside: int | None,
    ends: tuple[int, ...],
    tiny: MakeTiny,
    tmp_path: Path,
) -> None:
    text = json.loads((tiny(family) / "config.json").read_text())
    text |= {"eos_token_id": inside, "dtype": None}
    outer = {"architectures": [name], "eos_token_id": outside, "dtype": "float16"}
    edit(tmp_path / "config.json", **outer, text_config=text)
    info = inspect_checkpoint(tmp_path)
    assert info.eos_token_ids == ends
    assert info.dtype == "float16"


def test_sharded_is_the_same_model(sharded: Path, tiny: MakeTiny) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    want = decode(cut(open_checkpoint(tiny("llama")), 2), PROMPT, 8)
    assert decode(cut(open_checkpoint(sharded), 2), PROMPT, 8) == want


def test_a_stage_opens_only_its_own_files(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    its = {i.file for name, i in checkpoint.tensors.items() if name.startswith("model.layers.2.")}
    others = {info.file for info in checkpoint.tensors.values()} - its
    assert others
    for file in others:
        file.unlink()
    load_stage(checkpoint, 2, 3)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_stage(checkpoint, 0, 1)


def test_of_one_file_and_several_the_one_counts(
    sharded: Path, tiny: MakeTiny, tmp_path: Path
) -> None:
    """As transformers reads such a directory."""
    shutil.copy(tiny("llama", seed=1) / "model.safetensors", sharded)
    got = decode(cut(open_checkpoint(sharded), 2), PROMPT, 8)
    assert got == generated(sharded, PROMPT, 8)
    assert got != decode(cut(open_checkpoint(tiny("llama")), 2), PROMPT, 8)


def test_fingerprint(mine: Path, tiny: MakeTiny, tmp_path: Path) -> None:
    first = open_checkpoint(mine).fingerprint
    assert open_checkpoint(tiny("llama")).fingerprint == first
    edit(mine / "config.json", transformers_version="5.99")
    assert open_checkpoint(mine).fingerprint == first
    edit(mine / "config.json", rms_norm_eps=1e-3)
    assert open_checkpoint(mine).fingerprint != first
    assert open_checkpoint(tiny("llama-tied")).fingerprint != first


def test_another_cut_into_files_is_the_same_model(sharded: Path, tiny: MakeTiny) -> None:
    assert open_checkpoint(sharded).fingerprint == open_checkpoint(tiny("llama")).fingerprint


def test_other_weights_are_another_model(mine: Path, tiny: MakeTiny) -> None:
    """Same configuration, shapes and sizes: as a base model and its chat model, say."""
    first = open_checkpoint(mine).fingerprint
    assert open_checkpoint(tiny("llama", seed=1)).fingerprint != first

    def scale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.mlp.down_proj.weight"] *= -2

    assert open_checkpoint(retensor(mine, scale)).fingerprint != first


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float32, "bf16", torch.bfloat16),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(tiny: MakeTiny, stored: torch.dtype, asked: str, used: torch.dtype) -> None:
    checkpoint = open_checkpoint(tiny("llama", dtype=stored))
    assert resolve_dtype(checkpoint.info, asked) is used
    stage = load_stage(checkpoint, 1, 2, dtype=asked)
    assert {x.dtype for x in stage.shard.linears} == {used}


def test_unknown_dtype(tiny: MakeTiny) -> None:
    with pytest.raises(UserError, match="int4"):
        resolve_dtype(open_checkpoint(tiny("llama")).info, "int4")


def renamed(path: Path, new: Callable[[str], str]) -> None:
    """The checkpoint's tensors under other names."""
    file = path / "model.safetensors"
    tensors = {new(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("new", "says"),
    [
        (lambda name: name.removeprefix("model."), "without 'model.', .*save it with AutoModelFor"),
        (lambda name: f"language_model.{name}", "no tensors named model.layers.*'language_model"),
    ],
)
def test_tensors_that_are_named_otherwise(mine: Path, new: Callable[[str], str], says: str) -> None:
    renamed(mine, new)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(mine)


@pytest.mark.parametrize("key", ["vision_config", "text_config"])
def test_a_null_vision_config_is_a_text_model(mine: Path, key: str) -> None:
    edit(mine / "config.json", **{key: None})
    assert decode(cut(open_checkpoint(mine), 2), PROMPT, 8) == generated(mine, PROMPT, 8)


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (2, 2), (3, 2), (0, LAYERS + 1)])
def test_layers_out_of_range_are_refused(tiny: MakeTiny, first: int, last: int) -> None:
    with pytest.raises(UserError, match="cannot be a stage"):
        load_stage(open_checkpoint(tiny("llama")), first, last)


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def bad_json(path: Path) -> None:
    (path / "config.json").write_text("{not json")


def list_config(path: Path) -> None:
    (path / "config.json").write_text("[1]")


def no_layers(path: Path) -> None:
    edit(path / "config.json", num_hidden_layers=None)


def wrong_type(path: Path) -> None:
    edit(path / "config.json", hidden_size="wide")


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def pickled_weights(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def truncated_header(path: Path) -> None:
    os.truncate(path / "model.safetensors", 300)


def empty_weights(path: Path) -> None:
    os.truncate(path / "model.safetensors", 0)


def garbage_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"x" * 64)


def lfs_pointer(path: Path) -> None:
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def index(path: Path, **weight_map: str) -> None:
    """In place of the single file, which goes by another name."""
    (path / "model.safetensors").rename(path / "part.safetensors")
    edit(path / "model.safetensors.index.json", weight_map=weight_map)


def index_of_missing_file(path: Path) -> None:
    index(path, **{"lm_head.weight": "gone.safetensors"})


def index_out_of_directory(path: Path) -> None:
    index(path, x="../model/part.safetensors")


def index_of_missing_tensor(path: Path) -> None:
    index(path, nothing="part.safetensors")


def bad_index(path: Path) -> None:
    index(path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (no_config, "has no config.json"),
        (bad_json, "cannot be read"),
        (list_config, "cannot be read"),
        (no_layers, "num_hidden_layers"),
        (wrong_type, "hidden_size"),
        (no_weights, "neither"),
        (pickled_weights, "safetensors"),
        (truncated, "cut off"),
        (truncated_header, "not a whole"),
        (empty_weights, "not a whole"),
        (garbage_header, "cannot be read"),
        (lfs_pointer, "not a whole"),
        (index_of_missing_file, "'gone.safetensors'"),
        (index_out_of_directory, "cannot be read"),
        (index_of_missing_tensor, "has no tensors named"),
        (bad_index, "cannot be read"),
    ],
)
def test_broken_checkpoints(mine: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(mine)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(mine)
    assert "\n" not in str(caught.value)


def test_missing_tensors_and_wrong_shapes(mine: Path, tiny: MakeTiny) -> None:
    edit(mine / "config.json", num_hidden_layers=LAYERS + 1)
    with pytest.raises(CheckpointError, match=f"no tensors of layer {LAYERS}"):
        load_stage(open_checkpoint(mine), 3, LAYERS + 1)
    edit(mine / "config.json", num_hidden_layers=LAYERS, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"missing tensors .*bias"):
        load_stage(open_checkpoint(mine), 0, 1)
    edit(mine / "config.json", attention_bias=False, intermediate_size=128)
    with pytest.raises(CheckpointError):
        load_stage(open_checkpoint(mine), 0, 1)


def retensor(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The same checkpoint with other tensors."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return path


@pytest.mark.parametrize("name", ["rotary_emb.cos_cached", "q_proj.lora_A.weight", "rotary_emb.x"])
def test_unknown_tensors_are_ignored(mine: Path, name: str) -> None:
    want = generated(mine, PROMPT, 8)
    extra = torch.ones(16) if name.endswith("x") else torch.ones(8, 64)
    retensor(mine, lambda tensors: tensors.update({f"model.layers.1.self_attn.{name}": extra}))
    assert generated(mine, PROMPT, 8) == want
    assert decode(cut(open_checkpoint(mine), 2), PROMPT, 8) == want


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("bias", (1, 1, 8, 8), torch.bool), ("mb", (8,), torch.uint8), ("count", (), torch.int64)],
)
def test_masks_and_counts_are_no_weights(
    mine: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """As causal masks that old programs stored in each layer."""
    want = decode(cut(open_checkpoint(mine), 2), PROMPT, 8)
    extra = {f"model.layers.1.self_attn.{name}": torch.ones(shape, dtype=dtype)}
    retensor(mine, lambda tensors: tensors.update(extra))
    assert decode(cut(open_checkpoint(mine), 2), PROMPT, 8) == want
    assert generated(mine, PROMPT, 8) == want


def test_a_vector_of_whole_numbers_is_no_weight_to_compute_with(mine: Path) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    retensor(mine, lambda tensors: tensors.update({norm: tensors[norm].to(torch.int8)}))
    with pytest.raises(CheckpointError, match="I8"):
        load_stage(open_checkpoint(mine), 0, 2)


def other_head(tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors["lm_head.weight"] = torch.randn(VOCAB, 64, generator=generator)


def same_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def only_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", [other_head, same_head, only_head])
def test_tied_heads_as_they_are_stored(
    tiny: MakeTiny, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    mine = retensor(shutil.copytree(tiny("llama-tied"), tmp_path / "model"), change)
    want = generated(mine, PROMPT, 8)
    assert (want != generated(tiny("llama-tied"), PROMPT, 8)) == (change is other_head)
    checkpoint = open_checkpoint(mine)
    for stages in (1, 2, LAYERS):
        assert decode(cut(checkpoint, stages), PROMPT, 8) == want
    same = change is not other_head
    assert cut(checkpoint, 1)[0].shard.model.config.tie_word_embeddings is same


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent state"),
        ({"architectures": ["MambaForCausalLM"]}, "recurrent state"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"num_kv_shared_layers": 10}, "share keys"),
        ({"num_local_experts": 8}, "mixture-of-experts layers are supported of .*Mixtral, .* only"),
        ({"vision_config": {}}, "multimodal"),
        ({"quantization_config": {"quant_method": "hqq"}}, "not read .*'hqq'.*; use the"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "'dynamic'"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "yarn"}},
            "'yarn' changes",
        ),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        ({"architectures": ["GPT2LMHeadModel"]}, "not supported; use one of: .*Llama"),
        ({"architectures": None}, "unknown architecture"),
    ],
)
def test_refusals(mine: Path, changes: dict[str, Any], says: str) -> None:
    edit(mine / "config.json", **changes)
    with pytest.raises(CheckpointError, match=says):
        inspect_checkpoint(mine)


def test_null_is_nothing(mine: Path) -> None:
    edit(mine / "config.json", quantization_config=None, text_config=None, vision_config=None)
    assert inspect_checkpoint(mine).layers == LAYERS


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": "4"}, "'num_attention_heads' expected int, got str"),
        ({"tie_word_embeddings": None}, "'tie_word_embeddings' expected bool"),
        ({"dtype": "auto"}, "auto"),
        ({"pad_token_id": VOCAB}, "Padding_idx"),
        ({"hidden_act": "silly"}, "silly"),
        ({"model_type": "mistral"}, "MistralForCausalLM, not the LlamaForCausalLM"),
        ({"intermediate_size": 128}, r"mismatched tensors \(model.layers.0.mlp.down_proj.weight,"),
    ],
)
def test_settings_that_transformers_refuses(mine: Path, changes: dict[str, Any], says: str) -> None:
    edit(mine / "config.json", **changes)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_stage(open_checkpoint(mine), 0, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/place", "./none", "a/b/c", "~/nothing-here"])
def test_no_such_directory(name: str) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        locate(name)


def test_hub(monkeypatch: pytest.MonkeyPatch, mine: Path) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(name: str, **_: object) -> str:
        raise LocalEntryNotFoundError(f"cannot reach the Hub for {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ClusterError, match=r"some/model is not a local dir.* download it else"):
        locate("some/model")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(mine))
    assert locate("some/model") == mine
    assert locate(mine) == mine


def test_only_what_is_read_is_downloaded(monkeypatch: pytest.MonkeyPatch, mine: Path) -> None:
    import huggingface_hub

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    wanted += ["tokenizer.model", "merges.txt", "additional_chat_templates/tools.jinja"]
    # The same weights once more, as their makers' own programs read them.
    twice = ["consolidated.safetensors", "original/consolidated.00.pth", "original/params.json"]
    fetched: list[str] = []

    def download(
        _: str, revision: None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        def one_of(name: str, patterns: list[str]) -> bool:
            return any(fnmatch(name, pattern) for pattern in patterns)

        there = [name for name in [*wanted, *twice] if one_of(name, allow_patterns)]
        fetched.extend(name for name in there if not one_of(name, ignore_patterns))
        return str(mine)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("some/model") == mine
    assert fetched == wanted


def test_a_download_that_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class LostError(Exception):
        """As of an HTTP library: of no class that we know."""

    def lost(name: str, **_: object) -> str:
        raise LostError("peer closed connection without sending complete message body")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lost)
    with pytest.raises(ClusterError, match=r"some/model .*peer closed connection"):
        locate("some/model")


def tokenizer(path: Path, vocab: object, added: object = ()) -> Path:
    path.mkdir(exist_ok=True)
    content = {"model": {"vocab": vocab}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def test_tokenizers_of_older_files(tmp_path: Path) -> None:
    """A vocabulary and its merges in files of their own, as slow tokenizers have them."""
    stored = json.loads((BUNDLED_TARGET / "tokenizer.json").read_bytes())["model"]
    edit(tmp_path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    (tmp_path / "vocab.json").write_text(json.dumps(stored["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in stored["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    assert token_ids(tmp_path).items() >= stored["vocab"].items()
    text = "Why is the sky blue?"
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(BUNDLED_TARGET).encode(text)[1:]
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"?")
    with pytest.raises(CheckpointError, match="takes the package sentencepiece"):
        token_ids(tmp_path)


def test_tokenizers_must_agree(tmp_path: Path) -> None:
    names_of = BACKEND.token_names

    def foreign_tokens(target: Path, draft: Path) -> tuple[int, ...] | None:
        return differing_tokens(names_of(str(target)), names_of(str(draft)))

    target = tokenizer(tmp_path / "target", {"a": 0, "b": 1}, [{"id": 2, "content": "<s>"}])
    foreign_tokens(target, tokenizer(tmp_path / "same", {"a": 0, "b": 1, "<s>": 2}))
    foreign_tokens(target, tokenizer(tmp_path / "unigram", [["a", 0.1], ["b", 0.2], ["<s>", 0]]))
    # What only one of them has is not drafted, and of large vocabularies what few tokens mean.
    assert foreign_tokens(target, tokenizer(tmp_path / "fewer", {"a": 0, "b": 1})) == ()
    added = {"a": 0, "b": 1, "<s>": 2, "<think>": 3}
    assert foreign_tokens(target, tokenizer(tmp_path / "more", added)) == (3,)
    names = {str(i): i for i in range(32)}
    large = tokenizer(tmp_path / "large", names)
    renamed = {**names, "<think>": 32, "<r>": 5}
    del renamed["5"]
    assert foreign_tokens(large, tokenizer(tmp_path / "renamed", renamed)) == (5, 32)
    for other in ({"c": 0, "b": 1}, {"a": 1, "b": 0, "<s>": 2}, {"d": 4}):
        assert foreign_tokens(target, tokenizer(tmp_path / "other", other)) is None
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        foreign_tokens(target, tmp_path)
    (tmp_path / "other" / "tokenizer.json").write_text('{"model": []}')
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        foreign_tokens(target, tmp_path / "other")


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("experts.0.w1", r"missing tensors \(model.layers.1.mlp.experts.down_proj, 2 in all"),
        ("experts.3.w3", r"has no tensor model.layers.1.mlp.experts.3.up_proj.weight"),
        ("gate", r"missing tensors \(model.layers.1.mlp.gate.weight"),
    ],
)
def test_missing_experts(tmp_path: Path, tiny: MakeTiny, lost: str, says: str) -> None:
    path = shutil.copytree(tiny("mixtral"), tmp_path / "model")
    retensor(path, lambda tensors: tensors.pop(f"model.layers.3.block_sparse_moe.{lost}.weight"))
    load_stage(open_checkpoint(path), 0, 2)
    with pytest.raises(CheckpointError, match=says):
        load_stage(open_checkpoint(path), 2, 4)


def test_an_expert_of_another_shape(tmp_path: Path, tiny: MakeTiny) -> None:
    path = shutil.copytree(tiny("olmoe"), tmp_path / "model")
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    retensor(path, lambda tensors: tensors.update({name: tensors[name][:, :90]}))
    with pytest.raises(CheckpointError, match=r"experts.5.down_proj.weight .*\[64, 90\], not"):
        load_stage(open_checkpoint(path), 0, 2)
