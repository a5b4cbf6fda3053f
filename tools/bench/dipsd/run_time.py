"""``python tools/bench dipsd-run``: a plan at run time next to greedy batching, on real processes.

Six draft nodes with one user each share two stages; devices are padded to given paces, and the text
of every answer is held against the sequential decoder's. What is planned, forecast and brought is
asked of the first stage while it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, PaceTable, TargetTable
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.local.children import ChildNode
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_nodes.node import listen
from asyncspec_nodes.node.reports import Report
from asyncspec_nodes.plugins.dipsd.running_cluster import why
from asyncspec_nodes.reference.check import CheckRequest, check
from asyncspec_protocol.ids import draft_rank
from asyncspec_protocol.messages import Finished, Output, PlanStatus
from tools.bench.dipsd.plan_log import Watch
from tools.bench.limits.requests import greedy
from tools.bench.options import SEVERAL, check_numbers

PROMPTS = (
    "Once upon a time there was a little fox",
    "Tom and Lily went to the park. They saw",
    "The cat sat",
    "One day, a boy named Ben found a big",
    "Mia liked to sing. Every day she",
    "Sam had a red ball. He",
)
STAGES_MS = ((60.0, 3.0), (30.0, 3.0))
"""Of each stage: a pass, and each row of it."""

TOKEN_MS = 12.0
LENGTHS = (2, 3, 4)
"""Of the drafts, where nothing is planned."""

WARM = 0.4
"""Share of the time until the first answer is complete that is start-up."""

START_SECONDS = 100.0


class Answer(Struct, frozen=True):
    """Of one user: when tokens came, which, and the statistics."""

    request: CheckRequest
    came: tuple[tuple[float, int], ...]
    stats: dict[str, float]


class Row(Struct, frozen=True):
    """All users under one policy: tokens a second of all of them together."""

    policy: str
    throughput: float


class Measured(Struct, frozen=True):
    """What came out; of each run with plans what the first stage said last while all were at
    work."""

    rows: tuple[Row, ...]
    reported: tuple[PlanStatus, ...]
    answers: int
    equal: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench dipsd-run``."""
    parser.add_argument("--max-new-tokens", type=int, default=100, help="of each answer (100)")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_numbers(options, max_new_tokens=SEVERAL)
    found = asyncio.run(_measure(options.max_new_tokens))
    if options.json:
        print(json.dumps(msgspec.to_builtins(found), indent=1))
    else:
        print("\n".join(table(found)))
    return 0 if found.equal == found.answers else 1


async def _measure(tokens: int) -> Measured:
    config = _config()
    async with LocalCluster(config, lambda report: None) as cluster:
        with tempfile.TemporaryDirectory(prefix="asyncspec-") as folder:
            drafts, ports = await _drafts(cluster.config, Path(folder))
            try:
                greedy = [f"dip-sd:length={length},plan=false" for length in LENGTHS]
                policies = [*greedy, "dip-sd", "dip-sd"]
                runs: list[list[Answer]] = []
                reported: list[PlanStatus] = []
                for policy in policies:
                    answers, last = await _together(config, ports, policy, tokens)
                    runs.append(answers)
                    reported += [last] if last is not None else []
            finally:
                await asyncio.gather(*(child.stop() for child in drafts))
    requests = [answer.request for answers in runs for answer in answers]
    compared = await check(cluster.config, requests)
    rows = tuple(Row(p, throughput(r)) for p, r in zip(policies, runs, strict=True))
    return Measured(rows, tuple(reported), len(compared), sum(one.equal for one in compared))


def _config() -> Config:
    target = TargetTable(path=str(BUNDLED_TARGET))
    config = local_config(target, DraftTable(source=str(BUNDLED_DRAFT)), len(STAGES_MS), 2)
    pace = {
        rank: PaceTable(seconds=(fixed + row) / 1000, plateau=1, row_seconds=row / 1000)
        for rank, (fixed, row) in enumerate(STAGES_MS, 1)
    }
    drafting = PaceTable(level_seconds=TOKEN_MS / 1000)
    pace |= {draft_rank(number): drafting for number in range(len(PROMPTS))}
    stages = tuple(node for node in config.node if node.rank)
    return msgspec.structs.replace(config, node=stages, pace=pace)


async def _drafts(config: Config, folder: Path) -> tuple[list[ChildNode], list[int]]:
    """The draft nodes, when all of them serve, and their ports."""
    file = folder / "cluster.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    children: list[ChildNode] = []
    ports: list[int] = []
    for number in range(len(PROMPTS)):
        rank, log = draft_rank(number), folder / f"draft-{number}.log"
        with listen.loopback() as sock:
            ports.append(sock.getsockname()[1])
            children.append(await ChildNode.start(rank, "draft", file, sock, log))
    serving = asyncio.Event()

    def received(report: Report) -> None:
        if all(child.ready for child in children):
            serving.set()

    watches = [asyncio.create_task(child.watch(received)) for child in children]
    try:
        async with asyncio.timeout(START_SECONDS):
            await serving.wait()
    except TimeoutError:
        await asyncio.gather(*(child.stop() for child in children))
        raise ClusterError(f"draft nodes did not load within {START_SECONDS:g} s") from None
    finally:
        for watch in watches:
            watch.cancel()
    return children, ports


async def _together(
    config: Config, ports: Sequence[int], policy: str, tokens: int
) -> tuple[list[Answer], PlanStatus | None]:
    """Every user asks at once; and what was planned for them."""
    name = config.cluster.name
    watch = Watch(name, ports[0])
    watching = asyncio.create_task(watch.run(len(ports)))
    try:
        asked = zip(ports, PROMPTS, strict=True)
        answers = await asyncio.gather(
            *(_ask(name, port, text, policy, tokens) for port, text in asked)
        )
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
    return answers, watch.reported


async def _ask(name: str, port: int, prompt: str, policy: str, tokens: int) -> Answer:
    submit = greedy(policy, tokens, prompt)
    client = await Client.connect("127.0.0.1", port, name)
    came: list[tuple[float, int]] = []
    ids: list[int] = []
    try:
        async for event in client.ask(submit):
            if isinstance(event, Finished):
                request = CheckRequest(submit, tuple(ids))
                return Answer(request, tuple(came), event.stats)
            if isinstance(event, Output):
                ids.extend(event.token_ids)
                came.append((time.monotonic(), len(event.token_ids)))
    finally:
        await client.close()
    raise ClusterError("an answer has no end")


def throughput(answers: Sequence[Answer]) -> float:
    """Tokens a second, from when all are at work until the first of them is done."""
    begun = min(answer.came[0][0] for answer in answers)
    end = min(answer.came[-1][0] for answer in answers)
    start = begun + WARM * (end - begun)
    tokens = sum(n for answer in answers for at, n in answer.came if start < at <= end)
    return tokens / (end - start)


def table(found: Measured) -> list[str]:
    """Markdown."""
    greedy = max(row.throughput for row in found.rows if "plan=false" in row.policy)
    lines = ["| | tokens/s | over greedy |", "| --- | ---: | ---: |"]
    for row in found.rows:
        share = row.throughput / greedy
        lines.append(f"| `{row.policy}` | {row.throughput:.1f} | {share:.3f} |")
    for reported in found.reported:
        in_use = f"{max(reported.batches)} batches" if any(reported.batches) else reported.used
        forecasts = (("plan", reported.planned), ("greedy batching", reported.greedy))
        rates = [(f"forecast of {name} ({in_use} in use)", rate) for name, rate in forecasts]
        rates.append(
            (
                f"brought, by the first stage's count of {reported.measured_seconds:.0f} s",
                reported.throughput,
            )
        )
        lines += [f"| {name} | {rate:.1f} | {rate / greedy:.3f} |" for name, rate in rates]
    for reported in found.reported:
        alpha = sum(reported.means) / len(reported.means)
        lines += ["", f"measured at the end: alpha {alpha:.2f}, {why(reported)}"]
    lines += ["", f"{found.equal} of {found.answers} texts are the sequential decoder's"]
    return lines
