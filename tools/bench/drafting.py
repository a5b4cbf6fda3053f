"""``python tools/bench drafting``: trees of several sessions together against one after another.

The bundled draft model and EAGLE head (or others), a context before the tip; medians of interleaved
repeats of one tree of so many levels for each session, in processor time. What is counted is a
level: of a batch it is one forward pass for all sessions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from asyncspec_nodes.cluster.checkpoints import (
    BUNDLED_DRAFT,
    BUNDLED_EAGLE,
    BUNDLED_TARGET,
    check_target,
)
from asyncspec_nodes.console.bounds import COUNT, Bounds
from tools.bench.options import check_numbers

SESSIONS = (1, 2, 4, 8)
LEVELS = Bounds(1, 100)


class Level(Struct, frozen=True):
    """Seconds a level takes, for all of so many sessions."""

    source: str
    sessions: int
    together: float
    one_by_one: float

    @property
    def ratio(self) -> float:
        """How many times as long one after another takes."""
        return self.one_by_one / self.together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench drafting``."""
    parser.add_argument("--target", type=Path, default=BUNDLED_TARGET)
    parser.add_argument("--draft", type=Path, default=BUNDLED_DRAFT)
    parser.add_argument("--eagle", type=Path, default=BUNDLED_EAGLE)
    parser.add_argument("--context", type=int, default=256, help="committed tokens of each session")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--width", type=int, default=10, help="children a node, nodes a level")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    model_info = check_target(options.target, 1)
    check_numbers(
        options,
        context=Bounds(1, model_info.context_length),
        levels=LEVELS,
        width=Bounds(1, model_info.vocab_size),
        repeats=COUNT,
    )
    found = [*measure(options)]
    if options.json:
        lines = [to_builtins(level) | {"ratio": level.ratio} for level in found]
        sys.stdout.write(json.dumps(lines) + "\n")
        return 0
    sys.stdout.write("| source | sessions | together, ms a level | one after another | ratio |\n")
    sys.stdout.write("| --- | ---: | ---: | ---: | ---: |\n")
    for level in found:
        times = f"{1e3 * level.together:.2f} | {1e3 * level.one_by_one:.2f} | {level.ratio:.2f}"
        sys.stdout.write(f"| {level.source} | {level.sessions} | {times} |\n")
    return 0


def measure(options: argparse.Namespace, sessions: Sequence[int] = SESSIONS) -> Iterator[Level]:
    """Draft model and head, for every number of sessions."""
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec.plugins.hf.heads.draft_model import load_draft
    from asyncspec.plugins.hf.heads.eagle.source import load_eagle

    target = open_checkpoint(options.target)
    draft = load_draft(open_checkpoint(options.draft), vocab=target.info.vocab_size)
    head = load_eagle(options.eagle, target)
    for name, source, width in (
        ("draft model", draft, 0),
        ("EAGLE head", head, head.features.width),
    ):
        yield from levels(name, source, width, options, sessions)


def levels(
    name: str, source: Any, width: int, options: argparse.Namespace, sessions: Sequence[int]
) -> Iterator[Level]:
    """One token source for every number of sessions; ``width``: columns of its features."""
    texts = _Texts(source, max(sessions), options, width)
    tries: dict[int, tuple[list[float], list[float]]] = {n: ([], []) for n in sessions}
    for repeat in range(options.repeats + 1):
        for n in sessions:
            both = texts.together(n), texts.one_by_one(n)
            if repeat:  # the first round warms up
                for found, seconds in zip(tries[n], both, strict=True):
                    found.append(seconds / options.levels)
    for n in sessions:
        yield Level(name, n, *map(statistics.median, tries[n]))


class _Texts:
    """Sessions of one source, each with a context; every tree grows below one token more."""

    def __init__(self, source: Any, count: int, options: argparse.Namespace, width: int) -> None:
        self._source = source
        self._options = options
        self._width = width
        self._known = [0] * count
        self._jobs(range(count), options.context, count=0)

    def together(self, count: int) -> float:
        """Seconds for the trees of ``count`` sessions in one batch."""
        from asyncspec.core.jobs import DraftBatch

        jobs = self._jobs(range(count), 1, count=64)
        return self._time([jobs[0] if count == 1 else DraftBatch(tuple(jobs))])

    def one_by_one(self, count: int) -> float:
        """Seconds for them one after another."""
        return self._time(self._jobs(range(count), 1, count=64))

    def _time(self, jobs: Sequence[Any]) -> float:
        # Of this process: what else runs on the machine counts less.
        begin = time.process_time()
        for job in jobs:
            self._source.run(job)
        return time.process_time() - begin

    def _jobs(self, sessions: Sequence[int], news: int, count: int) -> list[Any]:
        """A question for every session, ``news`` tokens further on. A prompt is read at once."""
        from asyncspec_protocol.ids import SessionId, Version
        from asyncspec_protocol.messages import Expand

        options, jobs = self._options, []
        for session in sessions:
            base = self._known[session]
            committed = tuple((7 * (base + i) + session) % 500 for i in range(news))
            self._feed(session, base, news)
            self._known[session] += news
            shape = (options.levels, options.width, count)
            jobs.append(Expand(SessionId(session), Version(0), base, committed, *shape))
            if not count:
                self._source.run(jobs[-1])
        return jobs

    def _feed(self, session: int, base: int, news: int) -> None:
        """The features a head needs: any will do, they cost the same."""
        import torch

        from asyncspec.core.jobs import Feed, TensorRows
        from asyncspec_protocol.ids import SessionId

        start, end = max(base, 1) - 1, base + news - 1
        if self._width and end > start:
            features = torch.randn(end - start, self._width)
            self._source.run(
                Feed(SessionId(session), start, (TensorRows(features, tuple(range(end - start))),))
            )
