"""Asks the stages of a running cluster what each of them computes, beside its draft node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec.structs import asdict, replace

from asyncspec.actor.routing import Host
from asyncspec.actor.runtime import Runtime
from asyncspec.backend.registry import backend_of
from asyncspec.core.jobs import TensorRows
from asyncspec.core.machine import Finish
from asyncspec.core.tensors import WireTensor
from asyncspec_nodes.cluster.config import Config, layout
from asyncspec_nodes.cluster.placement import with_layers
from asyncspec_nodes.cluster.security import contexts
from asyncspec_nodes.node import listen
from asyncspec_nodes.roles.stage_probe import CHUNK, StageProbe, StageProbeConfig, StageStates
from asyncspec_protocol.ids import MAX_DRAFTS, Rank, draft_rank, first_session_since
from asyncspec_protocol.messages import Hello, Welcome

LINK_SECONDS = 10.0
PROBE_SECONDS = 120.0
"""Time for all texts, once the stages are linked."""

ROWS = 4096
"""Tokens of all texts together that are read, where there are a few."""

RANK = draft_rank(MAX_DRAFTS - 1)
"""The probe's rank: an operator's own draft nodes count from 0."""


class WireTensors:
    """``Tensors`` of a node that has no device."""

    def pack(self, rows: TensorRows) -> WireTensor:
        raise AssertionError("a probe sends no tensors")

    def unpack(self, tensor: WireTensor) -> object:
        return replace(tensor, data=memoryview(bytes(tensor.data)))


class _End(Host):
    """Knows how a probe has ended, and which stages refused it."""

    def __init__(self) -> None:
        self.finished: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self.refusals: dict[Rank, str] = {}

    def finish(self, effect: Finish) -> None:
        if not self.finished.done():
            self.finished.set_result(effect)

    def refused(self, rank: Rank, reason: str) -> None:
        self.refusals[rank] = reason


async def probe(
    config: Config,
    welcome: Hello | Welcome,
    texts: Sequence[tuple[int, ...]],
    *,
    same_machine: bool,
) -> StageStates:
    """Have each of ``texts`` (tokens) read by the stages of the cluster whose draft node has said
    ``welcome``. ``config``: with the stages' addresses; ``same_machine``: they are here."""
    backend = backend_of(config.target.path)
    layers = backend.inspect(config.target.path).layers
    depths = tuple(end for _, end in layout(with_layers(config), layers))
    nodes = [config.at(rank) for rank in range(1, config.stages + 1)]
    addresses = tuple((node.host, node.port) for node in nodes)
    rows = max(CHUNK, ROWS // max(1, len(texts)))
    facts = asdict(welcome) | {"rank": RANK, "role": "draft", "layers": (0, 0)}
    first = first_session_since(RANK, time.time_ns())
    texts = tuple(text[:rows] for text in texts)
    machine = StageProbe(StageProbeConfig(len(addresses), texts, depths, first))
    end = _End()
    with listen.loopback() as sock:
        runtime = Runtime(
            machine,
            machine.initial(),
            me=Hello(**facts),
            peers={Rank(rank): where for rank, where in enumerate(addresses, start=1)},
            sock=sock,
            run_job=lambda job: None,
            abandon_job=lambda job: None,
            tensors=WireTensors(),
            host=end,
            tasks={},
            security=contexts(config.security),
        )
        running = asyncio.create_task(runtime.run())
        try:
            waits = (running, end.finished)
            first_done = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait(waits, timeout=LINK_SECONDS, return_when=first_done)
            if not done and runtime.state.text >= 0:
                done, _ = await asyncio.wait(waits, timeout=PROBE_SECONDS, return_when=first_done)
            if not done:
                refusals = (f"stage {rank}: {why}" for rank, why in end.refusals.items())
                return StageStates(error="; ".join(refusals) or "the stages do not answer in time")
        finally:
            runtime.stop()
            await asyncio.gather(running, return_exceptions=True)
    if end.finished not in done:
        return StageStates(error=str(running.exception()))
    if problem := end.finished.result().detail:
        return StageStates(error=problem)
    return StageStates(depths, runtime.state.chunks, addresses, same_machine)
