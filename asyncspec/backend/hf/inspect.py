"""What a checkpoint is, from its JSON files alone: instant, before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.backend.hf.families import architecture, refuse_unsupported, scaling_kind
from asyncspec.errors import CheckpointError

GENERATION_CONFIG = "generation_config.json"


class Facts(Struct, frozen=True):
    """The essentials of a ``config.json`` and ``generation_config.json``."""

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    # Longest sequence in tokens the model was made for.
    context_length: int
    # Any of them ends an answer; may be empty.
    eos_token_ids: tuple[int, ...]
    # What the configuration says: "float32", "float16", "bfloat16"; "" if it does not.
    dtype: str


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json`` as it is. Raises ``CheckpointError`` where it is missing or broken."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give a checkpoint's directory")
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{directory} has no config.json; give a Hugging Face checkpoint")
    return _read_json(file)


def inspect_checkpoint(directory: Path) -> Facts:
    """Facts of a causal language model this program can run. Raises ``CheckpointError``."""
    config = read_config(directory)
    refuse_unsupported(config, directory)
    return Facts(
        architecture=architecture(config),
        layers=_number(config, "num_hidden_layers", directory),
        hidden_size=_number(config, "hidden_size", directory),
        vocab_size=_number(config, "vocab_size", directory),
        context_length=_context(config, directory),
        eos_token_ids=_eos(directory, config),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
    )


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Tokens that end an answer: ``generation_config.json`` decides, then ``config.json``."""
    return _eos(directory, read_config(directory))


def read_generation_config(directory: Path) -> dict[str, Any]:
    """``generation_config.json`` as it is; empty where there is none. Raises ``CheckpointError``
    where it is broken."""
    file = directory / GENERATION_CONFIG
    return _read_json(file) if file.is_file() else {}


def context_length(directory: Path) -> int:
    """Longest sequence, prompt and answer, the model was made for, in tokens."""
    return _context(read_config(directory), directory)


def _context(config: dict[str, Any], where: Path) -> int:
    """Tokens that positions are made for: with YaRN the original length, stretched by its factor,
    whatever ``max_position_embeddings`` says. In these places transformers looks for the two; vLLM
    derives the same. Of linear scaling files do not say whether theirs is the stretched length."""
    most = _number(config, "max_position_embeddings", where)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    # Gemma 3's is always the stretched one.
    if scaling_kind(rope) != "yarn" or architecture(config) == "Gemma3ForCausalLM":
        return most
    name = "original_max_position_embeddings"
    said = next((at for at in (config, rope) if at.get(name) is not None), {name: most})
    original = _number(said, name, where)
    factor = rope.get("factor")
    if factor is None:
        return most  # it is what makes this of the original
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
        raise CheckpointError(f"config.json of {where} needs a positive number as factor")
    return int(original * factor)


def _eos(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    value = read_generation_config(directory).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"eos_token_id of {directory} is neither a number nor a list of them")
    return tuple(ids)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download it again") from error


def _number(config: dict[str, Any], name: str, where: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json of {where} needs a positive number as {name}")
    return value
