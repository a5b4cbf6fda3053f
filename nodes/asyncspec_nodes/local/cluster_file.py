"""The cluster file of a cluster on this machine."""

from __future__ import annotations

import os

from asyncspec_nodes.cluster.config_tables import (
    ClusterTable,
    Config,
    DraftTable,
    LimitsTable,
    NodeTable,
    PaceTable,
    SourceTable,
    TargetTable,
    TraceTable,
)

REJOIN_SECONDS = 5.0
"""Where a lost node does not come back, nothing waits for it for long. One that is started again is
waited for as long as it may take to load; or else the cluster ends."""

TRACED = TraceTable(events=200_000, text=True)
"""A run that is traced is traced from its nodes' first steps on."""


def local_config(
    target: TargetTable,
    draft: DraftTable,
    stages: int,
    sessions: int,
    *,
    traced: bool = False,
    apart: bool = False,
    stage_pace: PaceTable | None = None,
    draft_pace: PaceTable | None = None,
) -> Config:
    """The cluster file of a local cluster; its ports are filled in when its nodes are launched.
    ``apart``: the token source is a process of its own."""
    pace = dict.fromkeys(range(1, stages + 1), stage_pace) | {
        stages + 1 if apart else 0: draft_pace
    }
    return Config(
        cluster=ClusterTable(name=f"local-{os.getpid()}", stages=stages),
        target=target,
        draft=draft,
        limits=LimitsTable(sessions=sessions, rejoin_seconds=REJOIN_SECONDS),
        trace=TRACED if traced else TraceTable(),
        source=SourceTable(host="127.0.0.1", port=1) if apart else None,
        pace={rank: table for rank, table in pace.items() if table is not None},
        node=tuple(NodeTable(rank=r, host="127.0.0.1", port=1) for r in range(stages + 1)),
    )
