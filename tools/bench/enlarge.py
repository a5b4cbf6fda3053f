"""``python tools/bench enlarge``: a Llama checkpoint made larger without changing what it says.

The bundled models are too small to behave like large ones. An enlarged one has more to read, to
multiply and to send, for real; only what it adds ends in zeros:

- feed-forward: further columns with random weights, whose rows of the output projection are zero;
- layers: further ones with random weights, whose two output projections are zero, so that the
  residual stream passes them as it is. They stand evenly between the old ones;
- hidden size: the residual stream gets places that stay zero, since nothing writes there. The
  norms' mean is over more places then, which their weights and epsilon make up for.

The text is the same but for rounding: sums over more terms are cut in other blocks. Who measures
with such a model compares its text with the original's, and says so.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors import safe_open
from safetensors.torch import save_file

from asyncspec.core.errors import UserError
from asyncspec.plugins.hf.checkpoint.files.headers import list_tensors, main_dtype
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.console.bounds import COUNT
from tools.bench.options import check_numbers
from tools.bench.selection import make_folder

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SPREAD = 0.02
"""Standard deviation of random weights."""

Tensors = dict[str, torch.Tensor]


class Size(Struct, frozen=True):
    """What an enlarged model has; each at least what the old one has."""

    hidden: int
    feed_forward: int
    layers: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench enlarge``."""
    parser.add_argument("out", type=Path, help="directory of the new checkpoint")
    parser.add_argument("--source", type=Path, default=BUNDLED_TARGET, metavar="DIR")
    parser.add_argument("--hidden", type=int, metavar="N", help="hidden size")
    parser.add_argument("--feed-forward", type=int, metavar="N", help="feed-forward width")
    parser.add_argument("--layers", type=int, metavar="N", help="a multiple of the old number")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")


def run(options: argparse.Namespace) -> int:
    """Write it and say what it is."""
    check_numbers(options, hidden=COUNT, feed_forward=COUNT, layers=COUNT)
    old = size_of(read_config(options.source))
    size = Size(
        options.hidden or old.hidden,
        options.feed_forward or old.feed_forward,
        options.layers or old.layers,
    )
    written = enlarge(options.source, options.out, size, DTYPES[options.dtype])
    print(f"{options.out}: {written / 2**20:.0f} MiB, {size}")
    return 0


def enlarge(source: Path, out: Path, size: Size, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write the enlarged checkpoint; bytes of weights. Raises ``UserError``."""
    config = read_config(source)
    _check(source, config, size)
    if out.resolve() == source.resolve():
        raise UserError(f"{out} is the source itself; write to another folder")
    make_folder(out)
    old = size_of(config)
    tensors = _load(source)
    random = torch.Generator().manual_seed(0)
    grown: Tensors = {}
    for name, tensor in _layers_spread(tensors, old.layers, size.layers // old.layers, random):
        grown[name] = _grow(name, tensor.float(), old, size, random).to(dtype)
    save_file(grown, out / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "hidden_size": size.hidden,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "head_dim": head_dim(config),
        "rms_norm_eps": config["rms_norm_eps"] * old.hidden / size.hidden,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for name in FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
    return sum(tensor.nbytes for tensor in grown.values())


def longer_context(folder: Path, positions: int, source: Path = BUNDLED_TARGET) -> Path:
    """A checkpoint, said to have a context of so many tokens. What it writes past its own is of no
    worth; the work is the same."""
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stored_dtype(source: Path) -> torch.dtype:
    """The type most of a checkpoint's weights are stored in. Raises ``CheckpointError``."""
    return DTYPES[main_dtype(list_tensors(source))]


def read_config(source: Path) -> dict[str, Any]:
    """A checkpoint's configuration. Raises ``UserError``."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{source} is no checkpoint: {error}") from None
    if config.get("model_type") != "llama":
        raise UserError(f"{source} is a {config.get('model_type')} model; only llama is enlarged")
    return dict(config)


def size_of(config: dict[str, Any]) -> Size:
    """What a configuration has."""
    return Size(config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"])


def head_dim(config: dict[str, Any]) -> int:
    """Width of an attention head, which stays."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _check(source: Path, config: dict[str, Any], size: Size) -> None:
    old = size_of(config)
    for name in Size.__struct_fields__:
        if getattr(size, name) < getattr(old, name):
            raise UserError(f"{name} {getattr(size, name)} is below the {getattr(old, name)} there")
    if size.layers % old.layers:
        raise UserError(f"{size.layers} layers are no multiple of the {old.layers} there")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UserError(f"{source} has biases, which are not enlarged")


def _load(source: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _layers_spread(
    tensors: Tensors, layers: int, times: int, random: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors under their new names: each layer is followed by ``times - 1`` idle ones."""
    for name, tensor in tensors.items():
        if not name.startswith("model.layers."):
            yield name, tensor
            continue
        number, _, part = name.removeprefix("model.layers.").partition(".")
        yield f"model.layers.{int(number) * times}.{part}", tensor
        for i in range(1, times):
            yield f"model.layers.{int(number) * times + i}.{part}", _idle(part, tensor, random)


def _idle(part: str, like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A tensor of a layer that adds nothing."""
    if part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        return torch.zeros_like(like)
    return like if like.dim() == 1 else _noise(like.shape, random)


def _grow(
    name: str, tensor: torch.Tensor, old: Size, size: Size, random: torch.Generator
) -> torch.Tensor:
    """A tensor in its new shape: what meets zeros is random, what would write is zero."""
    kind = name.rpartition(".weight")[0].rpartition(".")[2]
    hidden, inner = size.hidden - old.hidden, size.feed_forward - old.feed_forward
    if tensor.dim() == 1:
        # A mean over more places, of which the new ones are zero, is smaller by that ratio.
        weights = tensor * math.sqrt(old.hidden / size.hidden)
        return torch.cat([weights, torch.ones(hidden)])
    if kind in ("o_proj", "down_proj"):
        tensor = _pad(tensor, columns=inner if kind == "down_proj" else 0)
        return _pad(tensor, rows=hidden)
    if kind == "embed_tokens":
        return _pad(tensor, columns=hidden)
    rows = inner if kind in ("gate_proj", "up_proj") else 0
    tensor = torch.cat([tensor, _noise((tensor.shape[0], hidden), random)], dim=1)
    return torch.cat([tensor, _noise((rows, tensor.shape[1]), random)])


def _pad(tensor: torch.Tensor, *, rows: int = 0, columns: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, columns, 0, rows))


def _noise(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=random) * SPREAD
