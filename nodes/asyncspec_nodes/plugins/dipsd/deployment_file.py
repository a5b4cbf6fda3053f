"""A description of devices and links for ``asyncspec plan``, as one TOML file."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncspec.core.errors import UserError, writing
from asyncspec.plugins.dipsd.model import (
    MAX_USERS,
    Count,
    Deployment,
    MemoryRule,
    ModelShape,
    StageProfile,
    User,
    Verifier,
)
from asyncspec.plugins.dipsd.online.request import measured_deployment
from asyncspec_nodes.cluster import toml_file
from asyncspec_nodes.console.bounds import GB

# The bounds lie far beyond any use; they keep sums and quotients finite.
Positive = Annotated[float, Meta(ge=1e-9, lt=1e12)]
NotNegative = Annotated[float, Meta(ge=0, lt=1e12)]
T = TypeVar("T")


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""


class VerifierTable(Table, frozen=True):
    """The target's shape, unless passes are described by rows; and what its stages share."""

    layers: Count | None = None
    hidden: Count | None = None
    ffn: Count | None = None
    # Between two stages, milliseconds.
    hop_ms: NotNegative = 0.0
    # Whose caches must fit: "all" users' (a real server), or those of one "batch" (the paper).
    memory: MemoryRule = "all"


class StageTable(Table, frozen=True):
    """One verify stage: its share of the layers, and its profile as affine in FLOPs; or in rows."""

    fixed_ms: NotNegative
    layers: Count | None = None
    tflops: Positive | None = None
    memory_gb: Positive | None = None
    # Milliseconds of each row of a pass: a drafted token, or the root of a draft. All that there
    # is beside fixed_ms, as a running cluster measures it.
    row_ms: NotNegative | None = None


class UserTable(Table, frozen=True):
    """One user or ``count`` equal ones; devices by ``token_ms``, or ``tflops`` and ``fixed_ms``."""

    alpha: Annotated[float, Meta(ge=0, le=1)]
    name: str = ""
    count: Annotated[int, Meta(ge=1, le=MAX_USERS)] = 1
    prefix: Count = 512
    token_ms: Positive | None = None
    tflops: Positive | None = None
    fixed_ms: NotNegative | None = None
    # A round's time on the link whatever its length, and what each drafted token adds.
    link_ms: NotNegative = 0.0
    link_token_ms: NotNegative = 0.0


class PlanTable(Table, frozen=True):
    """Which plans are possible."""

    # Tokens of the longest draft.
    longest: Annotated[int, Meta(ge=1, le=64)] = 20
    # Rows of a pass that users share at most; 0: any number.
    batch_rows: Annotated[int, Meta(ge=0, le=10**9)] = 0


class PlanFile(Table, frozen=True):
    """The whole file."""

    verifier: VerifierTable
    stage: tuple[StageTable, ...]
    user: tuple[UserTable, ...]
    # The draft model, whose shape turns users' ``tflops`` into times.
    draft: ModelShape | None = None
    plan: PlanTable = PlanTable()


def load(path: Path) -> Deployment:
    """The deployment a file describes. Raises ``UserError``."""
    return toml_file.load(path, "the description", parse)


def parse(text: str) -> Deployment:
    """A file's text as a deployment. Raises ``UserError``."""
    file = toml_file.decode(text, PlanFile)
    users, plan = _users(file), file.plan
    if not any(stage.row_ms is not None for stage in file.stage):
        return Deployment(users, _verifier(file), plan.longest, plan.batch_rows)
    # Passes by rows, as a running cluster measures them: neither FLOPs nor memory, and prefixes
    # cost nothing.
    table = file.verifier
    if (table.layers, table.hidden, table.ffn) != (None, None, None):
        raise UserError("row_ms says what layers, hidden and ffn would; leave them out")
    stages = []
    for i, stage in enumerate(file.stage):
        if stage.row_ms is None:
            raise UserError(f"give row_ms, as for the other stages (at stage[{i}])")
        if (stage.layers, stage.tflops, stage.memory_gb) != (None, None, None):
            raise UserError(f"row_ms takes no layers, tflops and memory_gb (at stage[{i}])")
        stages.append((stage.fixed_ms, stage.row_ms))
    deployment = measured_deployment([replace(u, prefix=0) for u in users], stages, plan.batch_rows)
    verifier = replace(deployment.verifier, hop_ms=table.hop_ms, memory=table.memory)
    return replace(deployment, verifier=verifier, longest=plan.longest)


def _verifier(file: PlanFile) -> Verifier:
    """Passes by FLOPs."""
    table = file.verifier
    keys = ("layers", "hidden", "ffn")
    shape = ModelShape(*(_given(getattr(table, key), f"verifier.{key}") for key in keys))
    stages = tuple(
        StageProfile(
            _given(stage.layers, f"stage[{i}].layers"),
            1e-9 / _given(stage.tflops, f"stage[{i}].tflops"),
            stage.fixed_ms,
            float("inf") if stage.memory_gb is None else stage.memory_gb * GB,
        )
        for i, stage in enumerate(file.stage)
    )
    held = sum(stage.layers for stage in stages)
    if held != shape.layers:
        raise UserError(f"the stages hold {held} layers in sum; the target has {shape.layers}")
    return Verifier(shape, stages, table.hop_ms, table.memory)


def _given(value: T | None, key: str) -> T:
    if value is None:
        raise UserError(f"missing key: {key}")
    return value


def _users(file: PlanFile) -> tuple[User, ...]:
    taken = Counter(name for one in file.user if one.name for name in _names(one.name, one.count))
    if twice := next((name for name, times in taken.items() if times > 1), None):
        raise UserError(f"two users are called {twice}; give each a name of its own")
    users: list[User] = []
    for i, table in enumerate(file.user):
        bases = (f"user{n}" for n in count(len(users) + 1))
        free = (b for b in bases if taken.keys().isdisjoint(_names(b, table.count)))
        names = _names(table.name or next(free), table.count)
        taken.update(names)
        times = (_token_ms(file, table, i), table.link_ms, table.link_token_ms)
        users += [User(name, table.alpha, table.prefix, *times) for name in names]
    if not users:
        raise UserError("there are no users; give at least one [[user]]")
    if len(users) > MAX_USERS:
        raise UserError(f"there are {len(users)} users; at most {MAX_USERS} can be planned for")
    return tuple(users)


def _names(base: str, count: int) -> list[str]:
    return [base] if count == 1 else [f"{base}-{n + 1}" for n in range(count)]


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
    return 1e-9 / table.tflops * file.draft.flops(1, table.prefix) + (table.fixed_ms or 0.0)


def save(path: Path, deployment: Deployment) -> None:
    """Write a running cluster's deployment as a file. Raises ``UserError``."""
    with writing(str(path)):
        path.write_text(to_toml(deployment), encoding="utf-8")


def to_toml(deployment: Deployment) -> str:
    """The file that loads as ``deployment``, whose passes are described by rows."""
    verifier, table = deployment.verifier, toml_file.table
    parts = ["# As measured on a running cluster: asyncspec plan dipsd THIS_FILE\n"]
    parts.append(table("[verifier]", {"hop_ms": verifier.hop_ms}))
    for stage in verifier.stages:
        row = stage.ms_per_flop * stage.layers / verifier.shape.layers
        parts.append(table("[[stage]]", {"fixed_ms": stage.fixed_ms, "row_ms": row}))
    for user in deployment.users:
        keys = ("name", "alpha", "token_ms", "link_ms")
        parts.append(table("[[user]]", {key: getattr(user, key) for key in keys}))
    plan = {"longest": deployment.longest, "batch_rows": deployment.batch_rows}
    return "\n".join([*parts, table("[plan]", plan)])
