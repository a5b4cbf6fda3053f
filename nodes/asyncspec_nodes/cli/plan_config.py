"""A description of devices and links for ``asyncspec plan``, as one TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from asyncspec.dipsd.model import (
    Deployment,
    MemoryRule,
    Shape,
    Stage,
    User,
    Verifier,
    drafted_ms,
)
from asyncspec.errors import UserError
from asyncspec_nodes.cluster import toml_file

Positive = Annotated[float, Meta(gt=0, lt=1e12)]
NotNegative = Annotated[float, Meta(ge=0, lt=1e12)]
Count = Annotated[int, Meta(ge=1, le=10**9)]
MOST_USERS = 1024
GB = 1e9


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file: no key it does not know."""


class VerifierTable(Table, frozen=True):
    """The target's shape, and what its stages share."""

    layers: Count
    hidden: Count
    ffn: Count
    # Between two stages, milliseconds.
    hop_ms: NotNegative = 0.0
    # Whose caches must fit: "all" users' (a real server), or those of one "batch" (the paper).
    memory: MemoryRule = "all"


class StageTable(Table, frozen=True):
    """One verify stage: its share of the layers, and its profile as affine in FLOPs."""

    layers: Count
    tflops: Positive
    fixed_ms: NotNegative
    memory_gb: Positive | None = None


class DraftTable(Table, frozen=True):
    """The draft model's shape: what users' ``tflops`` are turned into times with."""

    layers: Count
    hidden: Count
    ffn: Count


class UserTable(Table, frozen=True):
    """One user or ``count`` equal ones; devices by ``token_ms``, or ``tflops`` and ``fixed_ms``."""

    alpha: Annotated[float, Meta(ge=0, le=1)]
    name: str = ""
    count: Annotated[int, Meta(ge=1, le=MOST_USERS)] = 1
    prefix: Count = 512
    token_ms: Positive | None = None
    tflops: Positive | None = None
    fixed_ms: NotNegative | None = None
    # A round's time on the link whatever its length, and what each drafted token adds.
    link_ms: NotNegative = 0.0
    link_token_ms: NotNegative = 0.0


class PlanTable(Table, frozen=True):
    """What plans may be made: the longest draft."""

    longest: Annotated[int, Meta(ge=1, le=64)] = 20


class PlanFile(Table, frozen=True):
    """The whole file."""

    verifier: VerifierTable
    stage: tuple[StageTable, ...]
    user: tuple[UserTable, ...]
    draft: DraftTable | None = None
    plan: PlanTable = PlanTable()


def load(path: Path) -> Deployment:
    """The deployment a file describes. Raises ``UserError``."""
    return toml_file.load(path, "the description", parse)


def parse(text: str) -> Deployment:
    """A file's text as a deployment. Raises ``UserError``."""
    file = toml_file.decode(text, PlanFile)
    return Deployment(_users(file), _verifier(file), file.plan.longest)


def _verifier(file: PlanFile) -> Verifier:
    table = file.verifier
    if sum(stage.layers for stage in file.stage) != table.layers:
        given = sum(stage.layers for stage in file.stage)
        raise UserError(f"the stages hold {given} layers in sum; the target has {table.layers}")
    stages = tuple(
        Stage(
            stage.layers,
            1e-9 / stage.tflops,
            stage.fixed_ms,
            float("inf") if stage.memory_gb is None else stage.memory_gb * GB,
        )
        for stage in file.stage
    )
    shape = Shape(table.layers, table.hidden, table.ffn)
    return Verifier(shape, stages, table.hop_ms, table.memory)


def _users(file: PlanFile) -> tuple[User, ...]:
    users: list[User] = []
    for i, table in enumerate(file.user):
        base = table.name or f"user{len(users) + 1}"
        token_ms = _token_ms(file, table, i)
        for n in range(table.count):
            name = base if table.count == 1 else f"{base}-{n + 1}"
            user = User(
                name, table.alpha, table.prefix, token_ms, table.link_ms, table.link_token_ms
            )
            users.append(user)
    if not users:
        raise UserError("there are no users; give at least one [[user]]")
    if len(users) > MOST_USERS:
        raise UserError(f"there are {len(users)} users; at most {MOST_USERS} can be planned for")
    return tuple(users)


def _token_ms(file: PlanFile, table: UserTable, i: int) -> float:
    where = f"(at user[{i}])"
    if table.token_ms is not None:
        if table.tflops is not None or table.fixed_ms is not None:
            raise UserError(f"token_ms says what tflops and fixed_ms would; leave them out {where}")
        return table.token_ms
    if table.tflops is None:
        raise UserError(f"give token_ms, or tflops and fixed_ms {where}")
    if file.draft is None:
        raise UserError(f"tflops needs the draft model's shape: a [draft] table {where}")
    shape = Shape(file.draft.layers, file.draft.hidden, file.draft.ffn)
    return drafted_ms(shape, 1e-9 / table.tflops, table.fixed_ms or 0.0, table.prefix)
