"""Tiny checkpoints in the layouts that quantised models are published in, written number by number
as those layouts are defined, and beside each a dense one of the weights that its numbers stand
for."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import Struct
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncspec.plugins.hf.checkpoint.files.headers import SINGLE

Stored = dict[str, Tensor]


class Made(NamedTuple):
    """A quantised matrix: its tensors, by what follows the module's name, and its weights."""

    tensors: Stored
    dense: Tensor


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [n, m] -> int32 [n, m * bits / 32]: nibble i of a word is its element ``order[i]``."""
    per_word = 32 // bits
    codes = codes.long()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    packed = torch.zeros(len(codes), codes.shape[1] // per_word, dtype=torch.int64)
    for i, element in enumerate(order or range(per_word)):
        packed |= codes[:, element::per_word] << (bits * i)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def rounded(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> levels [N, K], scales [N, groups], zero points [N, groups]."""
    rows, width = weight.shape
    blocks = weight.view(rows, -1, width if group == -1 else group)
    most = 2**bits - 1
    if symmetric:
        scales = (blocks.abs().amax(-1) / (most // 2)).to(dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = ((high - low) / most).to(dtype)
        # Stored as one less by the first version of GPTQ, so that none is 0.
        zeros = (-low / scales.float()).round().clamp(1, most).long()
    levels = (blocks / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return levels.clamp(0, most).long().view(rows, width), scales, zeros


def stands_for(levels: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """[N, K] of levels, by the group [K] of each column."""
    return (levels - zeros[:, groups]).float() * scales.float()[:, groups]


def awq(weight: Tensor, group: int = 32) -> Made:
    """Words along the outputs, in the order of a kernel's reads."""
    levels, scales, zeros = rounded(weight, 4, group, symmetric=False, dtype=torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(levels.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t(),
    }
    return Made(tensors, stands_for(levels, scales, zeros, torch.arange(levels.shape[1]) // group))


def gptq(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    *,
    version: int = 1,
    symmetric: bool = False,
    act_order: bool = False,
    index: bool = True,
) -> Made:
    """Words along the inputs; zero points along the outputs."""
    width = weight.shape[1]
    group = width if group == -1 else group
    order = torch.arange(width)
    if act_order:
        order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    levels, scales, zeros = rounded(
        weight[:, order], bits, group, symmetric=symmetric, dtype=torch.float16
    )
    groups = torch.arange(width) // group
    dense, codes, g_idx = torch.empty_like(weight), torch.empty_like(levels), groups.clone()
    dense[:, order] = stands_for(levels, scales, zeros, groups)
    codes[:, order], g_idx[order] = levels, groups
    tensors = {
        "qweight": words(codes, bits).t(),
        "qzeros": words((zeros - int(version == 1)).t(), bits),
        "scales": scales.t(),
    }
    if index:
        tensors["g_idx"] = g_idx.to(torch.int32)
    return Made(tensors, dense)


def packed(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
) -> Made:
    """compressed-tensors: pack-quantized."""
    made = gptq(weight, bits, group, version=2, symmetric=symmetric, act_order=act_order)
    stored = made.tensors
    tensors = {
        "weight_packed": stored["qweight"].t(),
        "weight_scale": stored["scales"].t(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        levels = unpacked(stored["qzeros"], bits)[:, : len(weight)].t()
        tensors["weight_zero_point"] = words(levels.t(), bits).t()
    if act_order:
        tensors["weight_g_idx"] = stored["g_idx"]
    return Made(tensors, made.dense)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``words``."""
    parts = [(packed.long() >> (bits * i)) & (2**bits - 1) for i in range(32 // bits)]
    return torch.stack(parts, -1).flatten(1)


def int8(weight: Tensor, *, symmetric: bool = True, one: bool = False) -> Made:
    """compressed-tensors: int-quantized, a scale for each output or one."""
    rows = weight.reshape(1, -1) if one else weight
    levels, scales, zeros = rounded(rows, 8, -1, symmetric=symmetric, dtype=torch.bfloat16)
    dense = (levels - zeros).float() * scales.float()
    tensors = {
        "weight": (levels - 128).to(torch.int8).view(weight.shape),
        "weight_scale": scales.view(1) if one else scales,
    }
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return Made(tensors, dense.view(weight.shape))


def fp8(
    weight: Tensor, block: tuple[int, int] | None = (32, 48), *, name: str = "weight_scale_inv"
) -> Made:
    """Blocks that the matrix need not be whole of; None: one scale."""
    rows, columns = block or weight.shape
    grid = (math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns))
    codes, dense = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[at] = codes[at].float() * scales[i, j]
    return Made({"weight": codes, name: scales if block else scales.view(())}, dense)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers up to 6 [..., 2 m] -> two codes a byte [..., m], and what they stand for."""
    nearest = (numbers.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    sign = numbers < 0
    codes = (nearest + 8 * sign).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, E2M1[nearest] * torch.where(sign, -1, 1)


def mxfp4(weight: Tensor) -> Made:
    """[..., N, K] in blocks of 32 with an exponent each."""
    blocks = weight.view(*weight.shape[:-1], -1, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scale = exponents.exp2().unsqueeze(-1)
    codes, numbers = e2m1(blocks / scale)
    tensors = {"_blocks": codes, "_scales": (exponents + 127).to(torch.uint8)}
    return Made(tensors, (numbers * scale).flatten(-2))


def packed_fp4(weight: Tensor, group: int) -> Made:
    """compressed-tensors: mxfp4-pack-quantized (groups of 32) or nvfp4-pack-quantized (16)."""
    if group == 32:
        made = mxfp4(weight)
        codes = made.tensors["_blocks"].flatten(-2)
        scales = made.tensors["_scales"]
        return Made({"weight_packed": codes, "weight_scale": scales}, made.dense)
    blocks = weight.view(len(weight), -1, 16)
    whole = 448 * 6 / weight.abs().max()
    scales = (blocks.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    scale = (scales.float() / whole).unsqueeze(-1)
    codes, numbers = e2m1((blocks / scale).clamp(-6, 6))
    tensors = {
        "weight_packed": codes.flatten(-2),
        "weight_scale": scales,
        "weight_global_scale": whole.view(1),
        "input_global_scale": torch.ones(1),
    }
    return Made(tensors, (numbers * scale).flatten(-2))


def nf4(weight: Tensor, *, nested: bool = False) -> Made:
    """bitsandbytes: blocks of 64 of the flat matrix, looked up in quantiles."""
    table = torch.erfinv(torch.linspace(-0.93, 0.93, 16)) / 1.3
    table[7], table[0], table[15] = 0.0, -1.0, 1.0
    flat = weight.reshape(-1, 64)
    largest = flat.abs().amax(-1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"}
    tensors: Stored = {}
    absmax = largest
    if nested:
        map_ = torch.linspace(-1, 1, 256)
        offset = float(largest.mean())
        parts = torch.split(largest - offset, 256)
        outer = torch.stack([part.abs().max() for part in parts])
        of_each = outer.repeat_interleave(256)[: len(largest)]
        absmax = (((largest - offset) / of_each).unsqueeze(-1) - map_).abs().argmin(-1)
        largest = map_[absmax] * of_each + offset
        absmax = absmax.to(torch.uint8)
        tensors = {"weight.nested_absmax": outer, "weight.nested_quant_map": map_}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = ((flat / largest.unsqueeze(-1)).unsqueeze(-1) - table).abs().argmin(-1)
    dense = (table[codes] * largest.unsqueeze(-1)).view(weight.shape)
    both = codes.view(-1, 2).to(torch.uint8)
    text = json.dumps(state | {"shape": list(weight.shape)}).encode()
    tensors |= {
        "weight": (both[:, 0] << 4 | both[:, 1]).view(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }
    return Made(tensors, dense)


def bitsandbytes_int8(weight: Tensor) -> Made:
    """Rows of bytes, whose largest stands for ``SCB``."""
    largest = weight.abs().amax(1)
    codes = (weight / largest.unsqueeze(1) * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Made(tensors, codes.float() * largest.unsqueeze(1) / 127)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' settings for one group of modules."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


class Published(Struct, frozen=True):
    """How a checkpoint is quantised."""

    make: Callable[[Tensor], Made]
    settings: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    family: str = "llama"


def _gptq(dtype: torch.dtype = torch.float16, **options: Any) -> Published:
    bits, group = options.get("bits", 4), options.get("group", 32)
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": options.get("act_order", False),
        "sym": options.get("symmetric", False),
    }
    if options.get("version") == 2:
        settings["checkpoint_format"] = "gptq_v2"
    return Published(lambda weight: gptq(weight, **options), settings, dtype)


def _packed(**options: Any) -> Published:
    bits, group = options.get("bits", 4), options.get("group", 32)
    more = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    if options.get("act_order"):
        more["actorder"] = "group"
    settings = compressed("pack-quantized", type="int", num_bits=bits, **more)
    return Published(lambda weight: packed(weight, **options), settings)


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 48], "activation_scheme": "dynamic"}
_BYTES = {"type": "int", "num_bits": 8}
_FLOATS = {"type": "float", "num_bits": 8}

PUBLISHED: Mapping[str, Published] = {
    "awq": Published(awq, _AWQ, torch.float16),
    "gptq": _gptq(),
    "gptq-v2-symmetric": _gptq(version=2, symmetric=True),
    "gptq-act-order": _gptq(act_order=True),
    "gptq-8-bits-rows": _gptq(bits=8, group=-1, index=False),
    "gptq-2-bits": _gptq(bits=2, dtype=torch.bfloat16),
    "w4a16": _packed(),
    "w4a16-asymmetric": _packed(symmetric=False),
    "w4a16-rows": _packed(group=-1),
    "w4a16-act-order": _packed(act_order=True, symmetric=False),
    "w8a16": _packed(bits=8),
    "w8a16-asymmetric-rows": _packed(bits=8, group=-1, symmetric=False),
    "int8-rows": Published(int8, compressed("int-quantized", **_BYTES, strategy="channel")),
    "int8-asymmetric": Published(
        lambda weight: int8(weight, symmetric=False), compressed("int-quantized", **_BYTES)
    ),
    "int8-tensor": Published(
        lambda weight: int8(weight, one=True), compressed("naive-quantized", **_BYTES)
    ),
    "fp8-blocks": Published(fp8, _BLOCKS, family="qwen3"),
    "fp8-tensor": Published(
        lambda weight: fp8(weight, None), _BLOCKS | {"weight_block_size": None}
    ),
    "fp8-rows": Published(
        lambda weight: fp8(weight, (1, weight.shape[1]), name="weight_scale"),
        compressed("float-quantized", **_FLOATS, strategy="channel"),
    ),
    "fbgemm-fp8": Published(
        lambda weight: fp8(weight, (1, weight.shape[1]), name="weight_scale"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    "mxfp4-packed": Published(
        lambda weight: packed_fp4(weight, 32),
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32),
    ),
    "nvfp4-packed": Published(
        lambda weight: packed_fp4(weight, 16),
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16),
    ),
    "nf4": Published(nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4-nested": Published(
        lambda weight: nf4(weight, nested=True),
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        torch.float16,
    ),
    "bitsandbytes-int8": Published(
        bitsandbytes_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, torch.float16
    ),
}

LEFT_OUT = "model.layers.1.self_attn.o_proj"
"""Left as it was, as lists of modules not to convert say."""


_MATRICES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def publish(source: Path, directory: Path, how: Published) -> tuple[Path, Path]:
    """The directories of a checkpoint whose layers' matrices are quantised, but for ``LEFT_OUT``,
    and of a dense one with the same weights in float32."""
    stored: Stored = {}
    dense: Stored = {}
    for name, tensor in load_file(source / SINGLE).items():
        module = name.removesuffix(".weight")
        if name.endswith(_MATRICES) and tensor.dim() == 2 and module != LEFT_OUT:
            made = how.make(tensor.float())
            stored |= {f"{module}.{part}": one for part, one in made.tensors.items()}
            dense[name] = made.dense
        else:
            stored[name], dense[name] = tensor.to(how.dtype), tensor.to(how.dtype).float()
    return _save_both(source, directory, stored, dense, how.settings, how.dtype)


def publish_mxfp4(source: Path, directory: Path) -> tuple[Path, Path]:
    """As ``publish``, of gpt-oss: the experts of a layer in one stack, with matrices [in, out]."""
    stored: Stored = {}
    dense: Stored = {}
    for name, tensor in load_file(source / SINGLE).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made = mxfp4(tensor.float().transpose(1, 2).contiguous())
            stored |= {f"{name}{part}": one for part, one in made.tensors.items()}
            dense[name] = made.dense.transpose(1, 2)
        else:
            stored[name], dense[name] = tensor.bfloat16(), tensor.bfloat16().float()
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return _save_both(source, directory, stored, dense, settings, torch.bfloat16)


def _save_both(
    source: Path,
    directory: Path,
    stored: Stored,
    dense: Stored,
    settings: dict[str, Any],
    dtype: torch.dtype,
) -> tuple[Path, Path]:
    both = settings | {"modules_to_not_convert": ["lm_head", LEFT_OUT]}
    name = str(dtype).removeprefix("torch.")
    return (
        save(source, directory / "quantised", stored, dtype=name, quantization_config=both),
        save(source, directory / "dense", dense, dtype="float32"),
    )


def save(source: Path, directory: Path, tensors: Stored, **settings: Any) -> Path:
    """A copy of a checkpoint with other tensors and settings."""
    shutil.copytree(source, directory)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / SINGLE, metadata={"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return directory
