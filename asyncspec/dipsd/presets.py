"""The paper's constants (Qwen3-1.7B on an RTX 3090 drafts for Qwen3-32B on an A100-80GB)."""

from __future__ import annotations

from asyncspec.dipsd.model import (
    Deployment,
    Shape,
    Stage,
    User,
    Verifier,
    drafted_ms,
    even_stages,
)

DRAFT = Shape(28, 2048, 6144)
TARGET = Shape(64, 5120, 25600)
DEVICE_MS_PER_FLOP, DEVICE_FIXED_MS = 4.0305e-11, 33.8151
SERVER = Stage(TARGET.layers, 1.2077e-11, 95.1074, 8e10)
USERS, ALPHA, PREFIX, LINK_MS, LONGEST = 6, 0.78, 512, 3.0, 20

FIRST_LENGTH = 7
"""Every draft's length where Algorithm 1 starts, and of the fixed-length baseline."""


def paper(
    users: int = USERS,
    alpha: float = ALPHA,
    *,
    token_ms: float | None = None,
    link_ms: float = LINK_MS,
    prefix: int = PREFIX,
    stages: int = 1,
    hop_ms: float = 0.0,
) -> Deployment:
    """``users`` equal users; ``token_ms`` replaces the profile of the paper's device.

    More than one stage is ours: the paper's server cut into equal parts, its fixed cost with it.
    """
    if token_ms is None:
        token_ms = drafted_ms(DRAFT, DEVICE_MS_PER_FLOP, DEVICE_FIXED_MS, prefix)
    verifier = Verifier(TARGET, even_stages(TARGET, SERVER, stages), hop_ms, "batch")
    people = (User(f"user{m + 1}", alpha, prefix, token_ms, link_ms) for m in range(users))
    return Deployment(tuple(people), verifier, LONGEST)
