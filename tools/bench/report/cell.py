"""One measurement, and everything it depends on."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec
from msgspec import Struct

from asyncspec.core.sampling import Sampling
from asyncspec.sim.costs import ClusterCost
from tools.bench.prompts import Prompt

Engine = Literal["virtual", "real"]
Stats = dict[str, float]
"""What a run brought, by the names of docs/reference/metrics.md."""

GREEDY = Sampling()


class Ask(Struct, frozen=True):
    """What the target is asked: with the target itself this decides the text."""

    prompt: Prompt
    sampling: Sampling = GREEDY
    # Most new tokens.
    tokens: int = 128


class Setting(Struct, frozen=True):
    """How it is answered; this decides how fast."""

    policy: str
    # Of what, as in ``models.SOURCES``.
    source: str = "eagle"
    stages: int = 4
    cost: ClusterCost = ClusterCost()
    engine: Engine = "virtual"


class Cell(Struct, frozen=True):
    """One request under one setting."""

    ask: Ask
    setting: Setting
    # Whose answers the source has seen before.
    earlier: tuple[Ask, ...] = ()


def key(what: Struct, *further: str) -> str:
    """A name for ``what`` under which its result is found again, as long as nothing that it or
    ``further`` (models, code) says has changed."""
    digest = hashlib.sha256(msgspec.json.encode(what, order="deterministic"))
    for text in further:
        digest.update(b"\0" + text.encode())
    return digest.hexdigest()[:32]
