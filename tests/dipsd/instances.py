"""Random deployments: like the paper's with unequal users, or anything."""

from __future__ import annotations

from random import Random

from asyncspec.plugins.dipsd.model import (
    ALPHA,
    LINK_MS,
    SERVER,
    TARGET,
    Deployment,
    StageProfile,
    User,
    Verifier,
)

KINDS = ("paper", "wild")
TOKEN_MS = 33.9


def instance(random: Random, users: int, kind: str) -> Deployment:
    """``paper``: its server, device speeds and links within factors. ``wild``: any server."""
    wild = kind == "wild"
    server = SERVER
    if wild:
        slope = SERVER.ms_per_flop * 2 ** random.uniform(0, 4)
        server = StageProfile(SERVER.layers, slope, random.uniform(20, 95), SERVER.memory_bytes)
    make = _wild_user if wild else _paper_user
    people = tuple(make(random, f"user{m + 1}") for m in range(users))
    return Deployment(people, Verifier(TARGET, (server,), 0.0, "batch"), 20)


def _wild_user(random: Random, name: str) -> User:
    prefix = random.choice((128, 512, 2048, 4096))
    return User(
        name, random.uniform(0.3, 0.97), prefix, random.uniform(5, 150), random.uniform(0, 60)
    )


def _paper_user(random: Random, name: str) -> User:
    return User(
        name,
        ALPHA + random.uniform(-0.2, 0.19),
        random.choice((256, 512, 1024)),
        TOKEN_MS * 2 ** random.uniform(-1, 1),
        LINK_MS * 2 ** random.uniform(-1, 3),
    )
