"""The layouts of published quantised matrices: which tensors make one, of which types and shapes.

Everything is checked against the files' headers, so that a checkpoint that does not fit its
settings is refused before anything is read. Which modules are quantised follows from the tensors
there are; lists of modules that are not need no reading. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo, main_dtype
from asyncspec.plugins.hf.checkpoint.formats.settings import Config, Layout, require_quantization
from asyncspec.plugins.hf.checkpoint.formats.tensors import DTYPES, FLOATS, Parts, QuantizedTensor

Matrices = Iterable[tuple[str, QuantizedTensor]]


def quantized_tensors(config: Config, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors by name, those of a quantised matrix put together under the matrix's name.
    ``config``: the language model's. Raises ``CheckpointError`` where some are missing, or do not
    fit each other or the settings."""
    matrices = dict(tensors)
    if (quantization := require_quantization(config)) is None:
        return matrices
    declared = str(config.get("dtype") or config.get("torch_dtype"))
    dtype = DTYPES.get(declared, DTYPES[main_dtype(tensors)])
    for name, info in tensors.items():
        for suffix in _SUFFIXES:
            if not name.endswith(suffix):
                continue
            scheme = quantization.scheme_of(module := name.removesuffix(suffix))
            codes, build = _LAYOUTS[scheme.layout]
            # A matrix that was left as it was has the same name as codes may have.
            if codes == suffix and (suffix != ".weight" or info.dtype in _CODE_TYPES):
                matrices |= build(Parts(quantization, scheme, module, matrices, dtype))
    return matrices


_CODE_TYPES = ("I8", "U8", "F8_E4M3", "F8_E5M2")


def _awq(parts: Parts) -> Matrices:
    """Codes [K, N / 8], eight outputs a word; scales [groups, N], zero points [groups, N / 8]."""
    codes = parts.take(".qweight", "I32", rank=2)
    scales = parts.take(".scales", *FLOATS, rank=2)
    parts.take(".qzeros", "I32", rank=2)
    width, (groups, height) = codes.shape[0], scales.shape
    parts.expect(".qweight", (width, -(-height // 8)))
    parts.expect(".qzeros", (groups, -(-height // 8)))
    if height % 8:
        raise parts.misshapen(".scales", scales, "a multiple of 8 columns")
    group = parts.group_of(width, groups, ".scales")
    yield f"{parts.module}.weight", parts.matrix(".qweight", (height, width), 4, group)


def _gptq(parts: Parts) -> Matrices:
    """Codes [K / 8, N], eight inputs a word (with 4 bits); scales [groups, N], zero points
    [groups, N / 8]; each input's group [K]."""
    codes = parts.take(".qweight", "I32", rank=2)
    scales = parts.take(".scales", *FLOATS, rank=2)
    zeros = parts.take(".qzeros", "I32", rank=2)
    parts.maybe(".g_idx", "I32", "I64", rank=1)
    groups, height = scales.shape
    bits = 32 * zeros.shape[1] // max(height, 1)
    declared = parts.scheme.bits
    if bits not in (2, 4, 8) or (declared and bits != declared):
        raise parts.wrong(f"has {bits} bits a weight in {parts.module}, expected {declared or 4}")
    per_word = 32 // bits
    width = codes.shape[0] * per_word
    parts.expect(".qweight", (width // per_word, height))
    parts.expect(".qzeros", (groups, height // per_word))
    parts.expect(".g_idx", (width,))
    if height % per_word:
        raise parts.misshapen(".scales", scales, f"a multiple of {per_word} columns")
    group = parts.group_of(width, groups, ".scales")
    shift = parts.quantization.zero_shift
    matrix = parts.matrix(".qweight", (height, width), bits, group, zero_shift=shift)
    yield f"{parts.module}.weight", matrix


def _packed(parts: Parts) -> Matrices:
    """compressed-tensors: codes [N, K / 8], eight inputs a word; scales [N, groups], zero points
    [N / 8, groups]; with reordered activations each input's group [K]."""
    codes = parts.take(".weight_packed", "I32", rank=2)
    scales = parts.take(".weight_scale", *FLOATS, rank=2)
    zeros = parts.maybe(".weight_zero_point", "I32", rank=2)
    parts.maybe(".weight_g_idx", "I32", "I64", rank=1)
    parts.drop(".weight_shape", *_ACTIVATIONS)
    bits, (height, groups) = parts.scheme.bits, scales.shape
    per_word = 32 // bits
    width = codes.shape[1] * per_word
    parts.expect(".weight_packed", (height, codes.shape[1]))
    if zeros is not None:
        parts.expect(".weight_zero_point", (-(-height // per_word), groups))
    parts.expect(".weight_g_idx", (width,))
    group = parts.group_of(width, groups, ".weight_scale")
    matrix = parts.matrix(".weight_packed", (height, width), bits, group)
    yield f"{parts.module}.weight", matrix


_ACTIVATIONS = (".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point")


def _bytes(parts: Parts) -> Matrices:
    """compressed-tensors: levels [N, K] of eight bits; [N, groups] or one scale and zero point."""
    codes = parts.take(".weight", "I8", rank=2)
    scales = parts.take(".weight_scale", *FLOATS)
    parts.maybe(".weight_zero_point", "I8")
    parts.drop(*_ACTIVATIONS)
    height, width = codes.shape
    groups = 1 if scales.shape in ((), (1,), (1, 1)) else scales.shape[-1]
    if scales.shape not in ((), (1,), (1, 1), (height, groups)):
        raise parts.misshapen(".weight_scale", scales, f"{height} rows")
    parts.expect(".weight_zero_point", scales.shape)
    group = parts.group_of(width, groups, ".weight_scale")
    yield f"{parts.module}.weight", parts.matrix(".weight", (height, width), 8, group)


def _bitsandbytes_int8(parts: Parts) -> Matrices:
    """Levels [N, K] of eight bits and the largest weight of each row [N], which 127 stands for."""
    codes = parts.take(".weight", "I8", rank=2)
    parts.take(".SCB", "F32", "F16", "BF16", rank=1)
    parts.drop(".weight_format")
    height, width = codes.shape
    parts.expect(".SCB", (height,))
    yield f"{parts.module}.weight", parts.matrix(".weight", (height, width), 8, width)


def _fp8(parts: Parts) -> Matrices:
    """Floating-point numbers of eight bits [N, K]; scales of the whole matrix, of rows, of groups
    of a row, or of blocks."""
    codes = parts.take(".weight", "F8_E4M3", rank=2)
    kinds = (*FLOATS, "F8_E8M0")
    scales = parts.maybe(".weight_scale_inv", *kinds)
    if scales is None:
        scales = parts.take(".weight_scale", *kinds)
    else:
        parts.parts[".weight_scale"] = parts.parts.pop(".weight_scale_inv")
    parts.drop(*_ACTIVATIONS, ".activation_scale", ".input_scale_ub")
    height, width = codes.shape
    scalar, declared = scales.shape in ((), (1,), (1, 1)), parts.scheme.block
    shape = (1, 1) if scalar else (*scales.shape, 1)[:2]
    block = declared if declared and not scalar else (-(-height // shape[0]), -(-width // shape[1]))
    if len(scales.shape) > 2 or shape != (-(-height // block[0]), -(-width // block[1])):
        raise parts.misshapen(".weight_scale", scales, f"{block[0]} x {block[1]} weights each")
    matrix = parts.matrix(".weight", (height, width), 8, width, block=block)
    yield f"{parts.module}.weight", matrix


def _fp4(parts: Parts) -> Matrices:
    """compressed-tensors: two numbers of four bits a byte [N, K / 2], a scale for each 32 or 16 of
    a row, as an exponent or of eight bits; the latter are divided by one of the matrix."""
    codes = parts.take(".weight_packed", "U8", rank=2)
    scales = parts.take(".weight_scale", "U8", "F8_E8M0", "F8_E4M3", rank=2)
    if scales.dtype == "F8_E4M3":
        parts.take(".weight_global_scale", "F32")
        parts.expect(".weight_global_scale", (1,))
    parts.drop(*_ACTIVATIONS, ".input_global_scale")
    height, width = codes.shape[0], 2 * codes.shape[1]
    group = 16 if scales.dtype == "F8_E4M3" else 32
    parts.expect(".weight_scale", (height, -(-width // group)))
    if width % group:
        raise parts.misshapen(".weight_packed", codes, f"a multiple of {group // 2} columns")
    yield f"{parts.module}.weight", parts.matrix(".weight_packed", (height, width), 4, group)


def _mxfp4(parts: Parts) -> Matrices:
    """Experts of gpt-oss: two numbers of four bits a byte [E, N, K / 32, 16] and the exponents
    [E, N, K / 32] of 32 numbers each."""
    codes = parts.take("_blocks", "U8", rank=4)
    scales = parts.take("_scales", "U8", rank=3)
    count, height, groups, half = codes.shape
    parts.expect("_blocks", (count, height, groups, 16))
    parts.expect("_scales", (count, height, groups))
    stem, _, stack = parts.module.rpartition(".")
    for number in range(count):
        parts.parts = {"blocks": _one_of(codes, number), "scales": _one_of(scales, number)}
        shape = (height, groups * 2 * half)
        # As the family has it (``experts.py``); it is read as [N, K] all the same.
        matrix = parts.matrix("blocks", shape, 4, 32, transposed=True)
        yield f"{stem}.{number}.{stack}.weight", matrix


def _one_of(stack: TensorInfo, number: int) -> TensorInfo:
    size = stack.size // stack.shape[0]
    offset = stack.offset + number * size
    return replace(stack, offset=offset, size=size, shape=stack.shape[1:])


# --- bitsandbytes in four bits.


class BlockState(Struct, frozen=True):
    """bitsandbytes' description of a matrix, which it stores as JSON beside the codes."""

    shape: tuple[int, int]
    blocksize: int
    nested_blocksize: int = 0
    nested_offset: float = 0.0


def read_state(info: TensorInfo) -> BlockState:
    """Raises ``CheckpointError``."""
    try:
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            return msgspec.json.decode(stream.read(info.size), type=BlockState)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{info.file.name} says what its bitsandbytes matrices are and is not here; download "
            "the whole checkpoint and give its directory"
        ) from error
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{info.file} has a quant_state of bitsandbytes that cannot be read ({error})"
        ) from error


def _bitsandbytes_4bit(parts: Parts) -> Matrices:
    """Two codes a byte [N K / 2, 1] in row order, looked up in 16 numbers; the largest weight of
    each block of the flat matrix, itself as bytes in 256 numbers if nested."""
    codes = parts.take(".weight", "U8")
    kind = next((k for k in ("fp4", "nf4") if parts.has(f"{_STATE}{k}")), "nf4")
    state = read_state(parts.take(f"{_STATE}{kind}", "U8"))
    parts.take(".weight.quant_map", "F32")
    parts.expect(".weight.quant_map", (16,))
    largest = parts.take(".weight.absmax", "F32", "U8", rank=1)
    (height, width), block = state.shape, state.blocksize
    count = height * width
    if block < 1 or count % 2 or codes.size != count // 2 or width % 2:
        raise parts.misshapen(".weight", codes, f"{[count // 2, 1]}")
    parts.expect(".weight.absmax", (-(-count // block),))
    if largest.dtype == "U8":
        parts.take(".weight.nested_absmax", "F32", rank=1)
        parts.take(".weight.nested_quant_map", "F32")
        parts.expect(".weight.nested_quant_map", (256,))
        nested = state.nested_blocksize
        parts.expect(".weight.nested_absmax", (-(-largest.shape[0] // max(nested, 1)),))
    more = {"block": (block, state.nested_blocksize), "offset_of_scales": state.nested_offset}
    yield f"{parts.module}.weight", parts.matrix(".weight", (height, width), 4, block, **more)


_STATE = ".weight.quant_state.bitsandbytes__"

Builder = Callable[[Parts], Matrices]
_LAYOUTS: Mapping[Layout, tuple[str, Builder]] = {
    "awq": (".qweight", _awq),
    "gptq": (".qweight", _gptq),
    "packed": (".weight_packed", _packed),
    "int8": (".weight", _bytes),
    "fp8": (".weight", _fp8),
    "fp4": (".weight_packed", _fp4),
    "mxfp4": ("_blocks", _mxfp4),
    "bnb4": (".weight", _bitsandbytes_4bit),
    "bnb8": (".weight", _bitsandbytes_int8),
}
_SUFFIXES = frozenset(suffix for suffix, _ in _LAYOUTS.values())
