"""What ``quantization_config`` of a published checkpoint says about its matrices. No torch.

Bits and group lengths are also known from the tensors' shapes (``tensors.py``), which decide;
settings must agree with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct

from asyncspec.backend.base import Quantize
from asyncspec.core.errors import CheckpointError, UserError

Config = Mapping[str, Any]

Layout = Literal["awq", "gptq", "packed", "int8", "fp8", "fp4", "mxfp4", "bnb4", "bnb8"]
"""How the tensors of a quantised matrix are named and laid out."""

LEVELS: frozenset[Layout] = frozenset({"awq", "gptq", "packed", "int8", "bnb8"})
"""Layouts of integer levels with scales, which kernels take (``packed.py``); the others are read
as dense matrices."""

READABLE = "AWQ, GPTQ, compressed-tensors, FP8, MXFP4, bitsandbytes"

SETTINGS = ("quantization_config", "compression_config")
"""Where ``config.json`` has them; the second is an older name of compressed-tensors'."""

GROUPS = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of weights of a row that may share a scale."""


class Scheme(Struct, frozen=True):
    """How some modules are quantised."""

    layout: Layout
    # Bits of a weight; 0: as the tensors' shapes say.
    bits: int = 0
    # Columns that share a scale; 0: as the shapes say, -1: all of a row.
    group: int = 0
    # Rows and columns that share a scale, of FP8 in blocks.
    block: tuple[int, int] | None = None


class Quantization(Struct, frozen=True):
    """How a checkpoint is quantised."""

    # For users.
    name: str
    # The first whose pattern matches a module's name from its start, or else the last.
    schemes: tuple[tuple[re.Pattern[str], Scheme], ...]
    # Added to stored zero points (GPTQ, version 1).
    zero_shift: int = 0

    def scheme_of(self, module: str) -> Scheme:
        """How a module is quantised, if it is."""
        matching = (scheme for pattern, scheme in self.schemes if pattern.match(module))
        return next(matching, self.schemes[-1][1])


class Unsupported(Exception):
    """The reason why a quantised checkpoint cannot be read, in a few words."""


def read_quantization(config: Config) -> Quantization | None:
    """None where ``config`` (of the language model) has no quantisation. Raises ``Unsupported``."""
    name = next((name for name in SETTINGS if config.get(name) is not None), None)
    if name is None:
        return None
    settings = config[name]
    if not isinstance(settings, dict):
        raise Unsupported(f"{name} is {settings!r}, expected an object")
    default = "compressed-tensors" if name == "compression_config" else None
    method = settings.get("quant_method", default)
    # bitsandbytes once left it out.
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _METHODS:
        raise Unsupported(f"quant_method is {method!r}")
    return _METHODS[method](settings)


def refusal(config: Config) -> str:
    """Why a quantised checkpoint cannot be read, "" if it can."""
    try:
        read_quantization(config)
    except Unsupported as error:
        return (
            f"its weights are quantised in a way that is not read ({error}); use the unquantised "
            f"checkpoint, which --quantize int8 or int4 makes as small, or one of {READABLE}"
        )
    return ""


def require_quantization(config: Config) -> Quantization | None:
    """As ``read_quantization``. Raises ``CheckpointError``."""
    if reason := refusal(config):
        raise CheckpointError(reason)
    return read_quantization(config)


def check_requantized(config: Config, quantize: Quantize) -> None:
    """Raises ``UserError`` where matrices that are kept as they are would have to be rounded."""
    quantization = require_quantization(config)
    if quantize == "none" or quantization is None:
        return
    if any(scheme.layout in LEVELS for _, scheme in quantization.schemes):
        raise UserError(
            f"the checkpoint is quantised as it is ({quantization.name}); "
            f"leave quantize {quantize} out"
        )


_ANY = re.compile("")


def _alone(
    name: str, scheme: Scheme, *, zero_shift: int = 0, overridden: bool = False
) -> Quantization:
    """One scheme for all modules. ``overridden``: some have others, which shapes tell."""
    if overridden:
        scheme = Scheme(scheme.layout)
    return Quantization(name, ((_ANY, scheme),), zero_shift)


def _awq(settings: Config) -> Quantization:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise Unsupported(f"AWQ in the layout {version!r}, not 'gemm'")
    bits = _number(settings, "bits", 4, (4,))
    return _alone("AWQ", Scheme("awq", bits, _group(settings, 128)))


def _gptq(settings: Config) -> Quantization:
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise Unsupported(f"GPTQ in the layout {'marlin' if form == 'gptq' else form!r}")
    scheme = Scheme("gptq", _number(settings, "bits", 4, (2, 4, 8)), _group(settings, 128))
    overridden = bool(settings.get("dynamic"))
    return _alone("GPTQ", scheme, zero_shift=int(form == "gptq"), overridden=overridden)


def _fp8(settings: Config) -> Quantization:
    if settings.get("expert_dtype", "fp8") != "fp8":
        raise Unsupported(f"FP8 with experts in {settings['expert_dtype']!r}")
    block = settings.get("weight_block_size")
    return _alone("FP8", Scheme("fp8", 8, block=None if block is None else _block(block)))


def _modelopt(settings: Config) -> Quantization:
    if (kind := settings.get("quant_algo")) != "FP8":
        raise Unsupported(f"modelopt's {kind!r}")
    return _alone("FP8", Scheme("fp8", 8))


def _bitsandbytes(settings: Config) -> Quantization:
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return _alone("bitsandbytes int8", Scheme("bnb8", 8, -1))
    return _alone("bitsandbytes 4 bit", Scheme("bnb4", 4))


_METHODS: Mapping[str, Callable[[Config], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": lambda settings: _compressed(settings),
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: _alone("FP8", Scheme("fp8", 8)),
    "modelopt": _modelopt,
    "mxfp4": lambda _: _alone("MXFP4", Scheme("mxfp4", 4, 32)),
    "bitsandbytes": _bitsandbytes,
}


# --- compressed-tensors: groups of modules, each with a scheme of its own.

_FORMATS: Mapping[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "int8",
    "float-quantized": "fp8",
    "mxfp4-pack-quantized": "fp4",
    "nvfp4-pack-quantized": "fp4",
}
_BITS = {"packed": (4, 8), "int8": (8,), "fp8": (8,), "fp4": (4,)}
_TYPES = {"packed": "int", "int8": "int", "fp8": "float", "fp4": "float"}
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


def _compressed(settings: Config) -> Quantization:
    groups, sparsity = settings.get("config_groups"), settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise Unsupported(f"compressed-tensors with sparse weights ({sparsity['format']!r})")
    if settings.get("transform_config"):
        raise Unsupported("compressed-tensors with transformed weights")
    if not isinstance(groups, dict) or not groups:
        raise Unsupported(f"compressed-tensors with config_groups {groups!r}")
    named: list[tuple[re.Pattern[str], Scheme]] = []
    classes: list[tuple[re.Pattern[str], Scheme]] = []
    for group in groups.values():
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
            raise Unsupported("a group of compressed-tensors without targets")
        if group.get("weights") is None:
            continue
        scheme = _group_scheme(group["weights"], group.get("format") or settings.get("format"))
        for target in map(str, group["targets"]):
            if target.startswith("re:"):
                named.append((_pattern(target.removeprefix("re:")), scheme))
            elif "." in target:
                named.append((re.compile(re.escape(target) + r"\Z"), scheme))
            else:  # a class, such as "Linear"
                classes.append((_ANY, scheme))
    if not named and not classes:
        raise Unsupported("compressed-tensors without quantised weights")
    return Quantization("compressed-tensors", (*named, *classes))


def _group_scheme(weights: object, form: object) -> Scheme:
    if not isinstance(weights, dict):
        raise Unsupported(f"compressed-tensors with weights {weights!r}")
    kind, strategy = weights.get("type", "int"), weights.get("strategy")
    if form == "naive-quantized":
        form = "int-quantized" if kind == "int" else "float-quantized"
    layout = _FORMATS.get(str(form))
    if layout is None:
        raise Unsupported(f"compressed-tensors in the format {form!r}")
    bits = _number(weights, "num_bits", 8, _BITS[layout])
    if kind != _TYPES[layout]:
        raise Unsupported(f"compressed-tensors {form} with weights of type {kind!r}")
    if strategy is not None and strategy not in _STRATEGIES:
        raise Unsupported(f"compressed-tensors with the strategy {strategy!r}")
    block = weights.get("block_structure")
    group = _group(weights, 0) if strategy in ("group", "tensor_group") else 0
    return Scheme(layout, bits, group, None if block is None else _block(block))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise Unsupported(f"a target that is no regular expression, {text!r}") from error


def _block(value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0:
            return rows, columns
    raise Unsupported(f"blocks of {value!r}, expected two positive numbers")


def _number(settings: Config, name: str, default: int, allowed: tuple[int, ...]) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or value not in allowed:
        raise Unsupported(f"{name} is {value!r}, expected {' or '.join(map(str, allowed))}")
    return int(value)


def _group(settings: Config, default: int) -> int:
    return _number(settings, "group_size", default, (*GROUPS, -1, *((0,) if not default else ())))
