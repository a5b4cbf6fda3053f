"""What ``asyncspec plan --connect`` plans for: a running cluster's users, as measured there."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from asyncspec.core.errors import ClusterError, UserError
from asyncspec.dipsd.decide import plan_request
from asyncspec.dipsd.model import Deployment
from asyncspec.dipsd.simulation import Noise
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster.toml_file import table
from asyncspec_protocol.ids import SessionId, draft_number, owner
from asyncspec_protocol.messages import PlanStatus, Rates


class Running(Struct, frozen=True):
    """The first stage's answer, and what it says of users and stages as what can be planned for."""

    told: PlanStatus
    deployment: Deployment
    noise: Noise


def ask(arguments: argparse.Namespace) -> Running:
    """Ask the cluster that was named. Raises ``UserError`` and ``ClusterError``."""
    return running(asyncio.run(_ask(cluster_options.read_address(arguments))))


async def _ask(where: ClusterAddress) -> PlanStatus:
    client = await where.connect()
    try:
        return await client.plan_status()
    finally:
        await client.close()


def running(told: PlanStatus) -> Running:
    """What can be planned for. Raises ``ClusterError`` where nobody takes part, or little is known
    of who does."""
    if not told.sessions and not told.unknown:
        raise ClusterError(
            "nobody uses the policy dip-sd there now; ask something with --policy dip-sd, and for "
            "its plan while it is answered"
        )
    if not told.sessions or not told.pass_seconds:
        users = f"{told.unknown + len(told.sessions)} answers with the policy dip-sd"
        raise ClusterError(f"too little is known yet of {users}; try again in a moment")
    planning = plan_request(rates(told), stages(told), names(told.sessions), told.batch_rows)
    return Running(told, planning.deployment, planning.noise)


def rates(told: PlanStatus) -> list[Rates]:
    """Of each user, as its draft node has told it."""
    columns = zip(
        *(told.sessions, told.rounds, told.lows, told.token_seconds, told.call_seconds),
        *(told.link_seconds, told.jitters, told.means, told.highs, told.link_jitters),
        strict=True,
    )
    return [Rates(*row) for row in columns]


def stages(told: PlanStatus) -> list[tuple[float, float, float]]:
    """Of each: (seconds of a pass, seconds of each row, relative deviation)."""
    return list(zip(told.pass_seconds, told.row_seconds, told.pass_jitters, strict=True))


def names(sessions: Sequence[SessionId]) -> list[str]:
    """Draft nodes by their numbers; where one has several users, each with a number behind."""
    drafts = [draft_number(owner(session)) for session in sessions]
    several, seen = Counter(drafts), Counter[int]()
    found: list[str] = []
    for draft in drafts:
        seen[draft] += 1
        found.append(f"draft-{draft}" + (f".{seen[draft]}" if several[draft] > 1 else ""))
    return found


# --- A deployment as a running cluster measures it, as a CONFIG for ``asyncspec plan``.

HEAD = "# As measured on a running cluster: asyncspec plan dipsd THIS_FILE\n"


def save(path: Path, deployment: Deployment) -> None:
    """Write the file. Raises ``UserError`` where that cannot be done."""
    try:
        path.write_text(to_toml(deployment), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def to_toml(deployment: Deployment) -> str:
    """The text of a file that says the same; ``deployment``'s passes are lines by rows
    (``RowCount``)."""
    verifier = deployment.verifier
    parts = [HEAD, table("[verifier]", {"hop_ms": verifier.hop_ms})]
    for stage in verifier.stages:
        row = stage.ms_per_flop * stage.layers / verifier.shape.layers
        parts.append(table("[[stage]]", {"fixed_ms": stage.fixed_ms, "row_ms": row}))
    for user in deployment.users:
        told = {"name": user.name, "alpha": user.alpha}
        times = {"token_ms": user.token_ms, "link_ms": user.link_ms}
        parts.append(table("[[user]]", {**told, **times}))
    rows = deployment.batch_rows or None
    parts.append(table("[plan]", {"longest": deployment.longest, "batch_rows": rows}))
    return "\n".join(parts)
