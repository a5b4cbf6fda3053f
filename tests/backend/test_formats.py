"""Checkpoints that their publishers have quantised, against the weights their numbers stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncspec.backend.base import DType, StageOptions
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import (
    Checkpoint,
    open_checkpoint,
    read_rows,
    read_tensor,
)
from asyncspec.plugins.hf.checkpoint.files.headers import SINGLE, TensorInfo
from asyncspec.plugins.hf.checkpoint.formats.levels import read_packed
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor
from asyncspec.plugins.hf.heads.draft_model import load_draft
from asyncspec.plugins.hf.model.stage import load_stage
from asyncspec.testing.pipeline import sequential
from backend.probe import Probe, cut, same_bits
from backend.quantized_checkpoints import LEFT_OUT, PUBLISHED, fp8, gptq, publish, publish_mxfp4
from backend.tiny import generated

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
SIZES = {"num_hidden_layers": 2, "intermediate_size": 96, "hidden_size": 64}


@pytest.fixture(scope="module")
def published(
    tiny: MakeTiny, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """Directories of a quantised checkpoint and of the dense one."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            how = PUBLISHED[name]
            source = tiny(how.family, **SIZES)
            made[name] = publish(source, tmp_path_factory.mktemp(name), how)
        return made[name]

    return make


Publish = Callable[[str], tuple[Path, Path]]


def quantised(checkpoint: Checkpoint) -> dict[str, QuantizedTensor]:
    found = {n: t for n, t in checkpoint.tensors.items() if isinstance(t, QuantizedTensor)}
    assert len(found) == 13, "all but one of seven matrices in two layers"
    assert f"{LEFT_OUT}.weight" not in found
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_what_the_numbers_stand_for(name: str, published: Publish) -> None:
    path, dense = published(name)
    want = load_file(dense / SINGLE)
    checkpoint = open_checkpoint(path)
    for tensor, info in quantised(checkpoint).items():
        torch.testing.assert_close(
            read_tensor(info, torch.float32), want[tensor], rtol=1e-6, atol=1e-7
        )
        some = read_rows(info, 3, 13)
        torch.testing.assert_close(some, want[tensor][3:13], rtol=1e-6, atol=1e-7)
    assert checkpoint.computed_dtype("auto") == (
        "bfloat16" if PUBLISHED[name].dtype == torch.bfloat16 else "float32"
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_levels_are_kept_as_they_are(name: str, published: Publish) -> None:
    path, dense = published(name)
    want = load_file(dense / SINGLE)
    for tensor, info in quantised(open_checkpoint(path)).items():
        if not info.is_levels:
            continue
        matrix, order = read_packed(info)
        assert (order is not None) == ("act-order" in name)
        columns = torch.arange(matrix.columns) if order is None else order
        torch.testing.assert_close(
            matrix.dequantized(), want[tensor][:, columns], rtol=1e-6, atol=1e-7
        )


def same_model(checkpoint: Checkpoint, dense: Path, seed: str) -> None:
    """Asserts that two stages have the logits of transformers' model with the dense weights, up to
    what kernels round rows to, and write its text: after each of its tokens the same one, where
    another is not about as likely."""
    random = Random(seed)
    prompt = [random.randrange(3, 150) for _ in range(40)]
    tokens = prompt + generated(dense, prompt, 16)
    model = AutoModelForCausalLM.from_pretrained(
        dense, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0]
    pipeline = cut(checkpoint, 2)
    rounds = any("int" in stage.shard.describe() for stage in pipeline)
    probe, compared = Probe(pipeline), 0
    sequential(pipeline, tokens, len(prompt))
    for position, logits in probe.take().items():
        off = (logits - want[position]).norm() / want[position].norm()
        assert off < (0.08 if rounds else 1e-4), position
        best, second = want[position].topk(2).values
        if best - second > (0.2 * want[position].std() if rounds else 0.001):
            compared += 1
            assert logits.argmax() == want[position].argmax()
    assert compared > 8


OFTEN = ("awq", "gptq-act-order", "w4a16-asymmetric", "w8a16", "fp8-blocks", "nf4")
STAGES = [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in PUBLISHED
]
"""Weights are compared in every layout, whole models in every kind of product."""


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_the_dequantised_model(name: str, published: Publish) -> None:
    path, dense = published(name)
    same_model(open_checkpoint(path), dense, name)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", STAGES)
def test_trees_have_the_bits_of_sequences(name: str, published: Publish) -> None:
    same_bits(cut(open_checkpoint(published(name)[0]), 2, dtype="auto"), name)


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "w8a16-asymmetric-rows"])
def test_without_onnxruntime(
    name: str, published: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes levels of four bits as they are; of eight, the matrix is kept dense."""
    monkeypatch.setattr("asyncspec.plugins.hf.kernels.linear.uses_levels", lambda _: False)
    path, dense = published(name)
    checkpoint = open_checkpoint(path)
    same_model(checkpoint, dense, name)
    same_bits(cut(checkpoint, 1), name)
    (foretold,) = BACKEND.footprints(str(path), [(0, 2)], StageOptions())
    stage = load_stage(checkpoint, 0, 2)
    assert ("int4" in stage.shard.describe()) == ("w8" not in name)
    assert stage.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.01)


def test_modules_quantised_in_different_ways(tiny: MakeTiny, tmp_path: Path) -> None:
    """Groups of compressed-tensors, and settings of GPTQ that are for some modules alone."""
    eight, four = PUBLISHED["w8a16"], PUBLISHED["w4a16"]
    (weights,) = (how.settings["config_groups"]["group_0"] for how in [eight])
    settings = four.settings | {"format": "mixed-precision"}
    settings["config_groups"] = {
        "group_0": settings["config_groups"]["group_0"] | {"format": "pack-quantized"},
        "group_1": weights | {"format": "pack-quantized", "targets": ["re:.*down_proj$"]},
    }
    override = {"+:.*\\.down_proj": {"bits": 8, "group_size": 64}}
    gptq_settings = PUBLISHED["gptq"].settings | {"dynamic": override}
    source = tiny("llama", **SIZES | {"intermediate_size": 128})
    for name, how in (
        ("packed", replace(four, settings=settings)),
        ("gptq", replace(PUBLISHED["gptq"], settings=gptq_settings)),
    ):
        wide = partial(gptq, bits=8, group=64) if name == "gptq" else eight.make
        mixed = replace(how, make=lambda w, h=how, m=wide: (m if w.shape[1] == 128 else h.make)(w))
        path, dense = publish(source, tmp_path / name, mixed)
        want = load_file(dense / SINGLE)
        for tensor, info in quantised(open_checkpoint(path)).items():
            assert info.bits == (8 if "down_proj" in tensor else 4)
            torch.testing.assert_close(
                read_tensor(info, torch.float32), want[tensor], rtol=1e-6, atol=1e-7
            )


# --- Families.

SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 64}


def agree(paths: tuple[Path, Path], seed: str) -> Checkpoint:
    """Text and bits of two stages; the opened quantised checkpoint."""
    checkpoint = open_checkpoint(paths[0])
    same_model(checkpoint, paths[1], seed)
    same_bits(cut(checkpoint, 2, dtype="auto"), seed)
    return checkpoint


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "gptq"),
        ("phi3", "awq"),
        ("qwen3-moe", "awq"),
        ("qwen3-moe-mixed", "fp8-rows"),
        ("deepseek-v3", "fp8-blocks"),
        ("minimax-m2", "fp8-blocks"),
        ("gemma3", "w4a16"),
    ],
)
def test_families(family: str, name: str, tiny: MakeTiny, tmp_path: Path) -> None:
    experts = {"moe_intermediate_size": 32} if "moe" in family or "deepseek" in family else {}
    experts |= {"intermediate_size": 32} if family == "minimax-m2" else {}
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32} if "deepseek" in family else {}
    kinds = {"layer_types": ["sliding_attention"] * 3} if family == "gemma3" else {}
    source = tiny(family, **(SMALL | experts | latent | kinds))
    checkpoint = agree(publish(source, tmp_path, PUBLISHED[name]), family)
    found = [n for n, t in checkpoint.tensors.items() if isinstance(t, QuantizedTensor)]
    assert any(".experts." in n for n in found) == bool(experts)


def test_stacked_experts_in_mxfp4(tiny: MakeTiny, tmp_path: Path) -> None:
    """gpt-oss, with transformers' own conversion."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    source = tiny("gpt-oss", **SMALL, layer_types=kinds)
    paths = publish_mxfp4(source, tmp_path)
    checkpoint, stored = agree(paths, "gpt-oss"), load_file(paths[0] / SINGLE)
    for stack in ("gate_up_proj", "down_proj"):
        stem = "model.layers.1.mlp.experts"
        parts = (stored[f"{stem}.{stack}_{part}"] for part in ("blocks", "scales"))
        want = convert_moe_packed_tensors(*parts)
        for number, dense in enumerate(want):
            info = checkpoint.tensors[f"{stem}.{number}.{stack}.weight"]
            assert torch.equal(read_tensor(info, torch.bfloat16), dense.t())


def test_blocks_of_fp8_as_transformers_reads_them(tiny: MakeTiny, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    source = tiny("qwen3", **SMALL, head_dim=32)
    how = PUBLISHED["fp8-blocks"]
    settings = how.settings | {"weight_block_size": [32, 32]}
    blocks = replace(how, make=lambda weight: fp8(weight, (32, 32)), settings=settings)
    path, _ = publish(source, tmp_path, blocks)
    stored = load_file(path / SINGLE)
    convert = Fp8Dequantize(None)._dequantize_one
    checkpoint = open_checkpoint(path)
    for name, info in checkpoint.tensors.items():
        if isinstance(info, QuantizedTensor):
            scales = stored[name.replace(".weight", ".weight_scale_inv")]
            want = convert(stored[name], scales, torch.bfloat16)
            assert torch.equal(read_tensor(info, torch.bfloat16), want)


# --- Memory.


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "w8a16-asymmetric-rows", "fp8-blocks"])
def test_memory_is_as_predicted(name: str, dtype: DType, published: Publish) -> None:
    path, _ = published(name)
    checkpoint = open_checkpoint(path)
    spans = [(0, 1), (1, 2), (0, 2)]
    # Graphs have norms in float32. The order of columns is not counted, nor that such a matrix is
    # no part of onnxruntime's graphs.
    slack = 0.1 if "order" in name else 0.01
    for span, foretold in zip(
        spans, BACKEND.footprints(str(path), spans, StageOptions(dtype=dtype)), strict=True
    ):
        stage = load_stage(checkpoint, *span, dtype=dtype)
        assert stage.shard.weight_bytes == pytest.approx(foretold.weights, rel=slack)
    whole = BACKEND.source_footprint(str(path), str(path), dtype)
    draft = load_draft(checkpoint, dtype=dtype)
    assert draft.shard.weight_bytes == pytest.approx(whole.weights, rel=max(0.02, slack))


def test_a_stage_needs_the_bytes_of_its_own_layers(published: Publish, tmp_path: Path) -> None:
    """What ``stage_files`` leaves out may be anything: the fingerprint reads samples of all."""
    path, _ = published("gptq-act-order")
    copy = shutil.copytree(path, tmp_path / "copy")
    (copy / SINGLE).write_bytes(bytes((path / SINGLE).stat().st_size))
    for part in BACKEND.stage_files(str(path), (1, 2)):
        with part.file.open("rb") as source, (copy / part.file.name).open("r+b") as target:
            source.seek(part.offset)
            target.seek(part.offset)
            target.write(source.read(part.length))
    mine, whole = open_checkpoint(copy), open_checkpoint(path)
    assert mine.fingerprint == whole.fingerprint
    for name, info in whole.tensors.items():
        if name.startswith(("model.layers.1.", "lm_head", "model.norm")):
            same = (read_tensor(one, torch.float32) for one in (info, mine.tensors[name]))
            assert torch.equal(*same), name


def test_scales_that_are_exponents_alone(tmp_path: Path) -> None:
    """E8M0 (OCP Microscaling Formats 1.0, 5.4.1), of which torch knows nothing before 2.7."""
    file = tmp_path / "file"
    file.write_bytes(bytes([0x38] * 255) + bytes(range(255)) + b"\x38\xff")

    def matrix(rows: int, offset: int) -> QuantizedTensor:
        codes = TensorInfo(file, offset, rows, "F8_E4M3", (rows, 1))
        scales = TensorInfo(file, offset + rows, rows, "F8_E8M0", (rows, 1))
        parts = {"weight": codes, "weight_scale": scales}
        return QuantizedTensor(file, offset, 4 * rows, "F32", (rows, 1), parts=parts)

    want = torch.tensor([2.0 ** (exponent - 127) for exponent in range(255)])
    assert torch.equal(read_tensor(matrix(255, 0), torch.float32)[:, 0], want)
    with pytest.raises(CheckpointError, match="not finite"):
        read_tensor(matrix(1, 510), torch.float32)


def test_settings_under_their_older_name(tiny: MakeTiny, tmp_path: Path) -> None:
    how = PUBLISHED["w4a16-asymmetric"]
    path, dense = publish(tiny(how.family, **SIZES), tmp_path, how)
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["compression_config"] = config.pop("quantization_config")
    del config["compression_config"]["quant_method"]
    file.write_text(json.dumps(config))
    same_model(open_checkpoint(path), dense, "older")
    assert BACKEND.footprints(str(path), [(0, 2)], StageOptions())


def test_every_part_counts_for_the_fingerprint(published: Publish, tmp_path: Path) -> None:
    path, _ = published("w4a16-asymmetric")
    found = {open_checkpoint(path).fingerprint}
    for i, part in enumerate(("weight_packed", "weight_scale", "weight_zero_point")):
        copy = shutil.copytree(path, tmp_path / str(i))
        tensors = load_file(copy / SINGLE)
        tensors[f"model.layers.0.mlp.up_proj.{part}"].view(-1)[0] += 1
        save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
        found.add(open_checkpoint(copy).fingerprint)
    assert len(found) == 4
