"""``asyncspec status``: the services in the background, or a running cluster's nodes."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import psutil

from asyncspec.core.errors import ClusterError
from asyncspec.placement.model import span_text
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.output import harmless
from asyncspec_nodes.local import service_file
from asyncspec_nodes.local.service_file import ServiceState
from asyncspec_protocol.clients import Status
from asyncspec_protocol.ids import DRAFT

ANSWER_SECONDS = 5.0
"""For a draft node to answer."""


def add_arguments(parser: Parser) -> None:
    cluster_options.add_address_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a service or cluster")


def run(arguments: argparse.Namespace) -> int:
    """Raises ``AsyncSpecError``."""
    if cluster_options.connects(arguments) or arguments.cluster is not None:
        nodes = asyncio.run(_nodes(cluster_options.read_address(arguments)))
        _print(arguments.json, {"nodes": nodes}, [*node_lines(nodes)])
        return 0
    states = service_file.running()
    for state in states:
        nodes, problem = (), ""
        if not state.pending and state.config is not None:
            draft = state.config.at(DRAFT)
            address = ClusterAddress(draft.host, draft.port, state.config.cluster.name)
            try:
                nodes = asyncio.run(_nodes(address))
            except ClusterError as error:
                problem = str(error)
        fields = {"service": state, "problem": problem, "nodes": nodes}
        _print(arguments.json, fields, [*service_lines(state, nodes, problem)])
    if not states and not arguments.json:
        sys.stdout.write(
            "no service runs in the background; asyncspec serve --background starts one\n"
        )
    return 0


async def _nodes(address: ClusterAddress) -> tuple[Status, ...]:
    """Raises ``ClusterError``."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS), await address.connect() as client:
            return await client.nodes()
    except TimeoutError:
        raise ClusterError(
            f"the draft node at {address.host}:{address.port} has not answered within "
            f"{ANSWER_SECONDS:g} s"
        ) from None


def service_lines(state: ServiceState, nodes: Sequence[Status], problem: str = "") -> Iterator[str]:
    """One service, for people."""
    what = state.model or "a service"
    where = f" on {state.url}" if state.url else f" on port {state.port}"
    yield f"{what}{where}, started {state.age()}, process {state.pid}"
    if state.version != service_file.program_version():
        yield f"  version   {state.version}; asyncspec serve --stop ends it"
        return
    if state.pending:
        yield f"  loads     {state.pending}"
    elif problem:
        yield f"  problem   {problem}"
    elif state.config is None:
        yield "  serves    a cluster of other machines"
    for node in nodes:
        if node.rank == DRAFT:
            yield f"  requests  {requests_text(node)}"
            if node.draft:
                yield f"  draft     {node.draft}"
        if "learned_version" in node.totals:
            yield f"  learns    {learning_text(node)}"
    if nodes:
        resident = 0
        with suppress(psutil.Error):
            resident = psutil.Process(state.pid).memory_info().rss
        memory = resident + sum(node.memory_bytes for node in nodes)
        yield f"  memory    {memory / 2**20:.0f} MiB in {1 + len(nodes)} processes"
    for path in map(service_file.log_path, (state.port, 0)):
        if path.exists():
            yield f"  log       {path}"
            return


def requests_text(draft: Status) -> str:
    """What a draft node works on, and has done."""
    ends = draft.totals
    answered = ends.get("requests_stop", 0) + ends.get("requests_length", 0)
    failed = ends.get("requests_error", 0)
    more = f", {failed:.0f} failed" if failed else ""
    return (
        f"{draft.sessions} running, {draft.waiting} waiting; {answered:.0f} answered "
        f"({ends.get('new_tokens', 0):.0f} tokens){more}"
    )


def learning_text(node: Status) -> str:
    """What a node's head has learned."""
    totals = node.totals
    version = f"version {totals['learned_version']:.0f}"
    if "learned_after" in totals:
        gain = f"{totals['learned_before']:.2f} to {totals['learned_after']:.2f}"
        version += f", from {gain} tokens guessed right in a row"
    return (
        f"{version}; {totals.get('learned_answers', 0):.0f} answers, "
        f"{totals.get('learned_seconds', 0):.0f} s"
    )


def node_lines(nodes: Sequence[Status]) -> Iterator[str]:
    """The nodes of a cluster, for people."""
    for node in nodes:
        host = f" on {node.host}" if node.host else ""
        memory = f"{node.memory_bytes / 2**20:.0f} MiB"
        if node.rank == DRAFT:
            yield f"draft node{host}: {node.model}; {requests_text(node)}; {memory}"
        else:
            busy = node.busy_seconds / max(node.up_seconds, 1e-9)
            layers = span_text(node.layers)
            yield f"stage {node.rank}{host}: {layers}; busy {busy:.0%} of its time; {memory}"
        if "learned_version" in node.totals:
            yield f"  learns: {learning_text(node)}"
        if node.missing:
            yield f"  {node.missing}"


def _print(as_json: bool, fields: object, lines: Sequence[str]) -> None:
    if as_json:
        lines = [msgspec.json.encode(fields).decode()]
    sys.stdout.write("".join(f"{harmless(line)}\n" for line in lines))
