"""Sampling settings that a target's files recommend, for requests that leave them out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncspec.backend.hf.inspect import GENERATION_CONFIG, read_generation_config
from asyncspec.errors import CheckpointError
from asyncspec.sampling import Defaults, Sampling
from asyncspec_nodes.cluster.config_tables import GenerationConfig
from asyncspec_nodes.serving.rules import settings_problem


def read_defaults(target: Path, which: GenerationConfig) -> Defaults:
    """What the checkpoint in ``target`` recommends, if ``which`` lets it. Raises
    ``CheckpointError`` for what makes no sense."""
    if which == "none":
        return Defaults()
    try:
        return _checked(_recommended(read_generation_config(target)))
    except ValueError as error:
        raise CheckpointError(
            f"{target / GENERATION_CONFIG}: {error}; correct it, or set generation_config to none"
        ) from None


def in_words(said: Mapping[str, int | float]) -> str:
    """Recommendations for a line of a log; empty where there are none."""
    return ", ".join(f"{name} {value:g}" for name, value in said.items())


def _recommended(config: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: config.get(name) for name in Defaults.__struct_fields__}
    if config.get("do_sample") is False:
        # The other settings say how to sample, which is not done.
        said = {"temperature": 0.0, "repetition_penalty": said["repetition_penalty"]}
    return said


def _checked(said: Mapping[str, Any]) -> Defaults:
    """Raises ``ValueError``."""
    try:
        defaults = msgspec.convert(said, Defaults)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        name = re.sub(r"\W", "", where)
        raise ValueError(f"{name}: {what[:1].lower()}{what[1:].replace('`', '')}") from None
    problem = settings_problem(1, defaults.fill(Sampling(), Defaults.__struct_fields__))
    if problem is not None:
        raise ValueError(problem)
    return defaults
