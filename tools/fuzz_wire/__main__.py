"""``python tools/fuzz_wire``: mutated frames against live nodes, beside a well-behaved client.

Exit code 1 where a node ends, an answer differs from the sequential decoder's, something is left
behind or memory grows; the last connections' frames are then in a file that ``--replay`` sends
again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[2]
# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(ROOT)

from asyncspec.actor import loop  # noqa: E402
from asyncspec.core.errors import UserError  # noqa: E402
from asyncspec_nodes.console.arguments import Parser, Version  # noqa: E402
from asyncspec_nodes.console.bounds import Bounds  # noqa: E402
from asyncspec_nodes.node.resources import resident_bytes  # noqa: E402
from tools.bench.selection import check_file  # noqa: E402
from tools.fuzz_wire.attack import Attack, HostilePipeline  # noqa: E402
from tools.fuzz_wire.bed import ANSWER_SECONDS, Bed, Beside, Found  # noqa: E402
from tools.fuzz_wire.replay import Replay, Role, Saved, load  # noqa: E402

Work = Coroutine[Any, Any, None]
Attackers = Callable[[float], list[Work]]
"""Of a share of all there is to send."""

ROLES = get_args(Role)
FRAMES = Bounds(1, 10**9)
ATTACKERS = 6
"""Hostile connections at a time."""

WARM = 0.2
"""Share of the frames after which memory is measured first."""

MAX_GROWTH = 48 << 20
"""Bytes that memory may grow by after that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 nothing was found, 1 something was, 2 a user's mistake."""
    parser = Parser("fuzz_wire", description=__doc__)
    parser.add_argument("--version", action=Version)
    parser.add_argument("--role", choices=[*ROLES, "all"], default="all", help="who is attacked")
    parser.add_argument("--frames", type=int, default=10**6, help="mutated ones, of each role")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="results on stdout, nothing else")
    parser.add_argument("--save", type=Path, default=Path("fuzz-wire-found.json"), metavar="FILE")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="send what was saved")
    options = parser.parse_args(argv)
    try:
        FRAMES.check("--frames", options.frames)
        results = _results(options)
    except UserError as error:
        sys.stderr.write(f"fuzz_wire: {error}\n")
        return 2
    if options.json:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        for result in results:
            sys.stdout.write("  ".join(f"{name} {value}" for name, value in result.items()) + "\n")
    return int(any(result["found"] for result in results))


def _results(options: argparse.Namespace) -> list[dict[str, object]]:
    """Of each role, to the first that something is found of. Raises ``UserError``."""
    if options.replay is not None:
        return [loop.run(_replay(load(options.replay)))]
    check_file("--save", options.save)
    results: list[dict[str, object]] = []
    for role in ROLES if options.role == "all" else (options.role,):
        results.append(loop.run(_attack(role, options)))
        if results[-1]["found"]:
            break
    return results


async def _attack(role: Role, options: argparse.Namespace) -> dict[str, object]:
    began, used = time.monotonic(), time.process_time()
    async with Bed() as bed:
        attack = Attack(bed, role, options.seed)

        def attackers(share: float) -> list[Work]:
            return [attack.run(int(share * options.frames)) for _ in range(ATTACKERS)]

        def progress() -> str:
            return f"{attack.mutated:,} of {options.frames:,} mutated frames"

        came = await _watch(bed, role, options.seed, attackers, None if options.json else progress)
        if came["found"]:
            Saved(role, options.seed, list(attack.recent)).write(options.save)
            sys.stderr.write(
                f"fuzz_wire: {role}, --seed {options.seed}: {came['found']}\n"
                f"the last connections are in {options.save}: --replay {options.save}\n"
            )
    return {
        "role": role,
        "seed": options.seed,
        "mutated": attack.mutated,
        "frames": attack.frames,
        "connections": attack._number,
        "seconds": round(time.monotonic() - began),
        "processor seconds": round(time.process_time() - used),
        **came,
    }


async def _replay(saved: Saved) -> dict[str, object]:
    """Send the saved connections again, in their order, beside what was beside them."""
    async with Bed() as bed:
        replay = Replay(bed, saved.connections)

        def attackers(share: float) -> list[Work]:
            return [replay.run(int(share * len(saved.connections))) for _ in range(ATTACKERS)]

        came = await _watch(bed, saved.role, saved.seed, attackers, None)
    return {"role": saved.role, "replayed": len(saved.connections), **came}


async def _watch(
    bed: Bed, role: Role, seed: int, attackers: Attackers, progress: Callable[[], str] | None
) -> dict[str, object]:
    """What came of attackers, beside the well-behaved client and, where draft nodes are attacked,
    one with hostile stages."""
    beside, pipeline = Beside(bed), HostilePipeline(bed, seed)
    tasks: list[asyncio.Task[None]] = []
    memory, found = [0, 0], ""
    try:
        await beside.prepare()
        tasks.append(asyncio.create_task(beside.run()))
        if role == "draft":
            tasks.append(asyncio.create_task(pipeline.run()))
        for number, share in enumerate((WARM, 1.0)):
            await _until(attackers(share), tasks, bed, progress)
            gc.collect()
            memory[number] = resident_bytes()
        answers = beside.answers
        async with asyncio.timeout(ANSWER_SECONDS):
            while beside.answers < answers + 5:
                await _until([asyncio.sleep(0.05)], tasks, bed, None)
        await _end(tasks)
        await bed.settled()
        if memory[1] - memory[0] > MAX_GROWTH:
            raise Found(f"memory has grown from {memory[0] >> 20} to {memory[1] >> 20} MiB")
    except Found as error:
        found = str(error)
    finally:
        await _end(tasks)
    return {
        "from hostile stages": pipeline.frames,
        "answers": beside.answers,
        "longest answer s": round(beside.longest, 1),
        "memory MiB": [size >> 20 for size in memory],
        "found": found,
    }


async def _until(
    work: Sequence[Work],
    others: Sequence[asyncio.Task[None]],
    bed: Bed,
    progress: Callable[[], str] | None,
) -> None:
    """Wait for attackers, with progress on stderr. Raises what any task does."""
    reported = time.monotonic()
    attackers = [asyncio.create_task(one) for one in work]
    try:
        while not all(task.done() for task in attackers):
            done, _ = await asyncio.wait(
                [*(task for task in attackers if not task.done()), *others],
                timeout=5.0,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                task.result()
            bed.check()
            if progress is not None and time.monotonic() - reported > 5.0:
                reported = time.monotonic()
                sys.stderr.write(f"{progress()}\n")
    finally:
        await _end(attackers)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    raise SystemExit(main())
