"""``--check``: the same requests once more by the sequential decoder, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from itertools import takewhile
from operator import eq

import msgspec
from msgspec import Struct

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.config import Config
from asyncspec_protocol.messages import Submit

CHECK_SECONDS = 3600.0
"""Time-out of a check."""


class Question(Struct, frozen=True):
    """A request and the cluster's tokens."""

    submit: Submit
    token_ids: tuple[int, ...]


class Task(Struct, frozen=True):
    """The child's whole input, as JSON on its stdin."""

    config: Config
    questions: tuple[Question, ...]


class Comparison(Struct, frozen=True):
    """Result of one question."""

    equal: bool
    # Length of the longer answer, and tokens before the first difference.
    tokens: int
    same: int
    sentence: str


def compare(given: Sequence[int], reference: Sequence[int]) -> Comparison:
    """Compare an answer's tokens with the sequential decoder's."""
    longest, same = max(len(given), len(reference)), sum(takewhile(bool, map(eq, given, reference)))
    equal = same == longest
    if equal:
        sentence = f"equal to the sequential decoder: {same} of {longest} tokens"
    else:
        ours, theirs = (str(x[same]) if same < len(x) else "the end" for x in (given, reference))
        sentence = (
            f"differs from the sequential decoder at token {same + 1} of {longest}: "
            f"{ours}, not {theirs}"
        )
    return Comparison(equal=equal, tokens=longest, same=same, sentence=sentence)


async def check(config: Config, questions: Sequence[Question]) -> list[Comparison]:
    """Decode in a child process. Raises ``ClusterError`` where that fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "asyncspec_nodes.reference.child"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return await _answer(process, Task(config, tuple(questions)))
    except TimeoutError:
        raise ClusterError(f"the check took longer than {CHECK_SECONDS:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _answer(process: asyncio.subprocess.Process, task: Task) -> list[Comparison]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    # Stdin stays open: its end tells the child that this process has ended.
    process.stdin.write(msgspec.json.encode(task) + b"\n")
    output, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
    process.stdin.close()
    if await process.wait() != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise ClusterError(f"the sequential decoder failed: {lines[-1]}")
    return msgspec.json.decode(output, type=list[Comparison])
