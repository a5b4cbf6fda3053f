"""Quantised checkpoints that cannot be read: one line with the reason and a way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncspec.backend.base import StageOptions
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.checkpoint.files.headers import SINGLE
from asyncspec.plugins.hf.checkpoint.formats.settings import READABLE
from asyncspec.plugins.hf.checkpoint.model_config import inspect_checkpoint
from asyncspec.plugins.hf.model.stage import load_stage
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from backend.quantized_checkpoints import PUBLISHED, compressed, publish
from commands import usage_error

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
Tensors = dict[str, torch.Tensor]


def settings_of(path: Path, **settings: Any) -> Path:
    """The checkpoint with settings of its quantisation changed."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= settings
    file.write_text(json.dumps(config))
    return path


@pytest.fixture
def make(tiny: MakeTiny, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint in one of the layouts."""

    def one(name: str) -> Path:
        source = tiny("llama", num_hidden_layers=1, intermediate_size=64)
        return publish(source, tmp_path, PUBLISHED[name])[0]

    return one


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], r"quantization_config is \[\]"),
        ({}, "quant_method is None"),
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
        ({"quant_method": ["awq"]}, r"quant_method is \['awq'\]"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ in the layout 'gemv', not 'gemm'"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3, expected 4"),
        ({"quant_method": "awq", "group_size": 48}, "group_size is 48"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, expected 2 or 4 or 8"),
        ({"quant_method": "gptq", "bits": True}, "bits is True"),
        ({"quant_method": "gptq", "checkpoint_format": "bitblas"}, "GPTQ in the layout 'bitblas'"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "GPTQ in the layout 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"blocks of \[0, 128\]"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "FP8 with experts in 'fp4'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt's 'NVFP4'"),
        (compressed("marlin-24"), "compressed-tensors in the format 'marlin-24'"),
        (compressed("pack-quantized", num_bits=3), "num_bits is 3, expected 4 or 8"),
        (compressed("pack-quantized", num_bits=4, type="float"), "with weights of type 'float'"),
        (compressed("int-quantized", strategy="token"), "with the strategy 'token'"),
        (compressed("int-quantized") | {"config_groups": {}}, "with config_groups {}"),
        (compressed("int-quantized") | {"config_groups": {"a": {}}}, "group .* without targets"),
        (
            compressed("int-quantized") | {"config_groups": {"a": {"targets": ["re:("]}}},
            "without quantised weights",
        ),
        (
            compressed("int-quantized")
            | {"config_groups": {"a": {"targets": ["re:("], "weights": {}}}},
            r"a target that is no regular expression, '\('",
        ),
        (
            compressed("int-quantized") | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparse weights",
        ),
        (compressed("int-quantized") | {"transform_config": {"a": 1}}, "transformed weights"),
    ],
)
def test_settings_that_are_not_read(
    settings: Any, says: str, tiny: MakeTiny, tmp_path: Path
) -> None:
    config = json.loads((tiny("llama") / "config.json").read_text())
    path = tmp_path
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(CheckpointError, match=says) as caught:
        inspect_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert f"makes as small, or one of {READABLE}" in str(caught.value)


def change(path: Path, edit: Callable[[Tensors], object]) -> Path:
    """The checkpoint with other tensors."""
    tensors = load_file(path / SINGLE)
    edit(tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / SINGLE, metadata={"format": "pt"})
    return path


MODULE = "model.layers.0.mlp.up_proj"


def put(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{MODULE}.{part}"] = change(tensors[f"{MODULE}.{part}"])

    return edit


def drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{MODULE}.{part}")


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("awq", drop("scales"), f"has no tensor {MODULE}.scales"),
        ("awq", drop("qzeros"), f"has no tensor {MODULE}.qzeros"),
        ("awq", put("qzeros", lambda x: x[:, :-1]), r"qzeros of shape \[2, 7\], expected \[2, 8\]"),
        (
            "awq",
            put("qweight", lambda x: x[:-32]),
            "2 scales for each 32 weights .*, expected groups of 32",
        ),
        ("awq", put("qweight", lambda x: x.float()), "qweight as F32, expected I32"),
        ("awq", put("scales", lambda x: x.view(-1)), r"scales of shape \[128\], expected 2 dim"),
        ("awq", put("scales", lambda x: x[:1]), "qzeros of shape"),
        ("gptq", drop("qzeros"), f"has no tensor {MODULE}.qzeros"),
        ("gptq", put("g_idx", lambda x: x[:-1]), r"g_idx of shape \[63\], expected \[64\]"),
        ("gptq", put("qzeros", lambda x: x[:, ::2]), "has 2 bits a weight in .*, expected 4"),
        ("w4a16", drop("weight_scale"), f"has no tensor {MODULE}.weight_scale"),
        (
            "w4a16",
            put("weight_scale", lambda x: x[:-8]),
            r"weight_packed of shape .* expected \[56",
        ),
        ("w4a16", put("weight_packed", lambda x: x[:, :-4]), "2 scales for each 32 weights"),
        ("int8-rows", put("weight_scale", lambda x: x[:-1]), r"weight_scale of shape \[63, 1\]"),
        ("fp8-blocks", drop("weight_scale_inv"), f"has no tensor {MODULE}.weight_scale"),
        ("fp8-blocks", put("weight_scale_inv", lambda x: x[:, :1]), r"expected 32 x 48 weights"),
        (
            "fp8-blocks",
            put("weight", lambda x: x.float().to(torch.float8_e5m2)),
            "weight as F8_E5M2, expected F8_E4M3",
        ),
        ("nf4", drop("weight.absmax"), f"has no tensor {MODULE}.weight.absmax"),
        ("nf4", put("weight", lambda x: x[:-1]), "weight of shape"),
        (
            "nf4",
            put("weight.quant_state.bitsandbytes__nf4", lambda x: x[:-9]),
            "a quant_state of bitsandbytes that cannot be read",
        ),
        ("bitsandbytes-int8", drop("SCB"), f"has no tensor {MODULE}.SCB"),
    ],
)
def test_tensors_that_do_not_fit(
    name: str, edit: Callable[[Tensors], object], says: str, make: Callable[[str], Path]
) -> None:
    path = change(make(name), edit)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("awq", put("scales", lambda x: x * torch.nan), "a scales that is not a finite number"),
        ("w4a16", put("weight_scale", lambda x: x / 0), "weight_scale that is not a finite"),
        ("gptq", put("g_idx", lambda x: x * 9), "a g_idx that names no group"),
        ("gptq", put("g_idx", lambda x: x * 0), "groups of different lengths"),
        ("fp8-blocks", put("weight_scale_inv", lambda x: x * torch.nan), "that are not finite"),
        (
            "fp8-rows",
            put("weight", lambda x: torch.full_like(x.float(), torch.nan).to(x.dtype)),
            "that are not finite",
        ),
        ("mxfp4-packed", put("weight_scale", lambda x: x | 255), "that are not finite"),
        ("nf4", put("weight.absmax", lambda x: x / 0), "that are not finite"),
        (
            "gptq",
            lambda tensors: tensors.update({f"{MODULE}.bias": torch.ones(64)}),
            f"has a bias {MODULE}.bias, which its model has not",
        ),
    ],
)
def test_numbers_that_make_no_matrix(
    name: str, edit: Callable[[Tensors], object], says: str, make: Callable[[str], Path]
) -> None:
    checkpoint = open_checkpoint(change(make(name), edit))
    with pytest.raises(CheckpointError, match=says) as caught:
        load_stage(checkpoint, 0, 1)
    assert "\n" not in str(caught.value)


def test_biases_of_zeros_are_none(make: Callable[[str], Path]) -> None:
    """As the first programs saved GPTQ for models without biases."""
    path = make("gptq")
    change(path, lambda tensors: tensors.update({f"{MODULE}.bias": torch.zeros(64)}))
    assert load_stage(open_checkpoint(path), 0, 1).guarantee == "bitwise"


def test_groups_that_settings_contradict(make: Callable[[str], Path]) -> None:
    path = settings_of(make("awq"), group_size=64)
    with pytest.raises(CheckpointError, match=r"has 2 scales for each 64 weights .* groups of 64"):
        open_checkpoint(path)


def test_other_settings_of_some_modules_are_told_by_shapes(make: Callable[[str], Path]) -> None:
    path = settings_of(make("gptq"), group_size=128, dynamic={"-:.*lm_head": {}})
    assert load_stage(open_checkpoint(path), 0, 1).guarantee == "bitwise"


def test_a_file_that_is_cut_off(make: Callable[[str], Path]) -> None:
    path = make("fp8-rows")
    data = (path / SINGLE).read_bytes()
    (path / SINGLE).write_bytes(data[:-5])
    with pytest.raises(CheckpointError, match="is cut off before tensor"):
        open_checkpoint(path)


def test_weights_without_settings(make: Callable[[str], Path]) -> None:
    path = make("fp8-rows")
    file = path / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"F8_E4M3 weights, which its config.json does not"):
        load_stage(open_checkpoint(path), 0, 1)


@pytest.mark.parametrize("name", ["awq", "w8a16"])
def test_quantize_is_refused_where_it_would_round_again(
    name: str, make: Callable[[str], Path]
) -> None:
    path = make(name)
    says = r"the checkpoint is quantised as it is \(.*\); leave quantize int4 out"
    with pytest.raises(UserError, match=says):
        load_stage(open_checkpoint(path), 0, 1, quantize="int4")
    with pytest.raises(UserError, match=says):
        BACKEND.footprints(str(path), [(0, 1)], StageOptions(quantize="int4"))


def test_a_cluster_file_that_asks_for_it_has_a_fault(
    make: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "cluster.toml", make("awq")
    shutil.copy(BUNDLED_TARGET / "tokenizer.json", target)
    node = '[[node]]\nrank = 1\nhost = "127.0.0.1"\nport = 7001\n'
    file.write_text(f'[target]\npath = "{target}"\nquantize = "int4"\n{node}')
    assert "leave quantize int4 out" in usage_error(capsys, "check", str(file))


@pytest.mark.parametrize("name", ["fp8-blocks", "nf4"])
def test_others_may_be_rounded(name: str, make: Callable[[str], Path]) -> None:
    path = make(name)
    stage = load_stage(open_checkpoint(path), 0, 1, quantize="int8")
    assert "int8" in stage.shard.describe()
    (foretold,) = BACKEND.footprints(str(path), [(0, 1)], StageOptions(quantize="int8"))
    assert stage.shard.weight_bytes == pytest.approx(foretold.weights, rel=0.01)


def test_commands_end_with_one_line(
    make: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make("awq"))
    memory = ("memory", "--target", path, "--stages", "1", "--draft", "none")
    assert "leave quantize int8 out" in usage_error(capsys, *memory, "--quantize", "int8")
    settings_of(Path(path), version="gemv")
    assert "AWQ in the layout 'gemv'" in usage_error(capsys, *memory)
