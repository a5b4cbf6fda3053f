"""``python tools/fuzz_wire``: mutated frames against live nodes, beside a well-behaved client.

Exit code 1 where a node ends, an answer differs from the sequential decoder's, something is left
behind or memory grows; the last connections' frames are then in a file that ``--replay`` sends
again.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(ROOT)

from asyncspec.actor import loop  # noqa: E402
from asyncspec_nodes.console.arguments import Version  # noqa: E402
from asyncspec_nodes.node.resources import resident_bytes  # noqa: E402
from tools.fuzz_wire.attack import Attack, Connection, HostilePipeline, send  # noqa: E402
from tools.fuzz_wire.bed import ANSWER_SECONDS, Bed, Beside, Found  # noqa: E402

ROLES = ("draft", "verify", "source")
ATTACKERS = 6
"""Hostile connections at a time."""

WARM = 0.2
"""Share of the frames after which memory is measured first."""

MAX_GROWTH = 48 << 20
"""Bytes that memory may grow by after that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 nothing was found, 1 something was, 2 a user's mistake."""
    parser = argparse.ArgumentParser("fuzz_wire", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=Version)
    parser.add_argument("--role", choices=[*ROLES, "all"], default="all", help="who is attacked")
    parser.add_argument("--frames", type=int, default=10**6, help="mutated ones, of each role")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="results on stdout, nothing else")
    parser.add_argument("--save", type=Path, default=Path("fuzz-wire-found.json"), metavar="FILE")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="send what was saved")
    options = parser.parse_args(argv)
    if options.frames < 1:
        sys.stderr.write(f"fuzz_wire: --frames {options.frames} is less than 1\n")
        return 2
    roles = ROLES if options.role == "all" else (options.role,)
    results, found = [], False
    for role in roles:
        result = loop.run(_replay(options) if options.replay else _attack(role, options))
        results.append(result)
        found = found or bool(result["found"])
        if options.replay or found:
            break
    if options.json:
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
    else:
        for result in results:
            sys.stdout.write("  ".join(f"{name} {value}" for name, value in result.items()) + "\n")
    return int(found)


async def _attack(role: str, options: argparse.Namespace) -> dict[str, object]:
    began, used = time.monotonic(), time.process_time()
    async with Bed() as bed:
        beside = Beside(bed)
        await beside.prepare()
        attack, memory, found = Attack(bed, role, options.seed), [0, 0], ""
        pipeline = HostilePipeline(bed, options.seed)
        tasks = [asyncio.create_task(beside.run())]
        if role == "draft":
            tasks.append(asyncio.create_task(pipeline.run()))
        try:
            for number, frames in enumerate((WARM * options.frames, options.frames)):
                attackers = [asyncio.create_task(attack.run(int(frames))) for _ in range(ATTACKERS)]
                try:
                    await _until(attackers, tasks, attack, options, bed)
                finally:
                    for attacker in attackers:
                        attacker.cancel()
                    await asyncio.gather(*attackers, return_exceptions=True)
                gc.collect()
                memory[number] = resident_bytes()
            answers = beside.answers
            async with asyncio.timeout(ANSWER_SECONDS):
                while beside.answers < answers + 5:
                    await _until(
                        [asyncio.create_task(asyncio.sleep(0.05))], tasks, attack, options, bed
                    )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await bed.settled()
            if memory[1] - memory[0] > MAX_GROWTH:
                raise Found(f"memory has grown from {memory[0] >> 20} to {memory[1] >> 20} MiB")
        except Found as error:
            found = str(error)
            _save(options.save, attack)
            sys.stderr.write(
                f"fuzz_wire: {role}, --seed {options.seed}: {found}\n"
                f"the last connections are in {options.save}: --replay {options.save}\n"
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return {
            "role": role,
            "seed": options.seed,
            "mutated": attack.mutated,
            "frames": attack.frames,
            "from hostile stages": pipeline.frames,
            "connections": attack._number,
            "answers": beside.answers,
            "longest answer s": round(beside.longest, 1),
            "memory MiB": [size >> 20 for size in memory],
            "seconds": round(time.monotonic() - began),
            "processor seconds": round(time.process_time() - used),
            "found": found,
        }


async def _until(
    attackers: list[asyncio.Task[None]],
    others: list[asyncio.Task[None]],
    attack: Attack,
    options: argparse.Namespace,
    bed: Bed,
) -> None:
    """Wait for attackers, with progress on stderr. Raises what any task does."""
    reported = time.monotonic()
    while not all(task.done() for task in attackers):
        done, _ = await asyncio.wait(
            [task for task in attackers if not task.done()] + others, timeout=5.0,
            return_when=asyncio.FIRST_COMPLETED,
        )  # fmt: skip
        for task in done:
            task.result()
        bed.check()
        if time.monotonic() - reported > 5.0 and not options.json:
            reported = time.monotonic()
            sys.stderr.write(f"{attack.mutated:,} of {options.frames:,} mutated frames\n")


def _save(path: Path, attack: Attack) -> None:
    recent = [
        {"rank": one.rank, "frames": [base64.b64encode(frame).decode() for frame in one.frames]}
        for one in attack.recent
    ]
    path.write_text(json.dumps(recent))


async def _replay(options: argparse.Namespace) -> dict[str, object]:
    """Send the saved connections again, in their order."""
    saved, found = json.loads(options.replay.read_text()), ""
    connections = [
        Connection(one["rank"], [base64.b64decode(frame) for frame in one["frames"]])
        for one in saved
    ]
    async with Bed() as bed:
        beside = Beside(bed)
        await beside.prepare()
        try:
            for one in connections:
                await send(bed.ports[one.rank], one.frames, random.Random(0))
                bed.check()
            await bed.settled()
        except Found as error:
            found = str(error)
    return {"role": "replay", "connections": len(connections), "found": found}


if __name__ == "__main__":
    raise SystemExit(main())
