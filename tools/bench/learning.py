"""``python tools/bench learn``: what ``[draft] learn`` brings on one topic, and what it costs.

Two clusters have the same head; the one of the second learns. It answers the prompts of the topic
but the first ``--new``, and learns from these for ``--minutes``. None of them should be among those
that the head was trained on, or there is little to learn. Meanwhile pairs of requests, one to each
cluster in turn, compare latencies: the learner trains until the request of its cluster comes, and
is stopped while the other cluster answers. Pairs before which it hardly trained do not count. Then
both clusters answer the new prompts in turn: texts must be the same, and tokens a round are those
of the head before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count, product
from pathlib import Path
from statistics import median

import psutil
from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.cluster.named_models import target_of
from asyncspec_nodes.console.bounds import COUNT, SECONDS, SOME_SECONDS
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from asyncspec_nodes.serving.requests import ChatText, encode_chat
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.messages import Finished, Output, Submit
from tools.bench.options import SEVERAL, check_numbers, check_policies, print_rows
from tools.bench.prompts import read_sets
from tools.bench.sql_questions import sql_questions

TEMPERATURES = (0.0, 0.8)

GAP = 3.0
"""Seconds without a request before each of a pair: the learner begins one second after the last."""

REST = 20.0
"""Seconds of training between pairs."""

AT_ONCE = 4
"""Requests to learn from that a cluster has at a time."""

TRAINING = 0.5
"""Share of a gap that the learner must have computed for its pair to count."""

LEARNER = "asyncspec.backend.learning.process"

SQL = "sql"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench learn``."""
    add = parser.add_argument
    add("--prompts", type=Path, metavar="DIR", help="folder of *.jsonl, a set each")
    topics = f"one of the sets; {SQL}: questions of the benchmark's own, about queries ({SQL})"
    add("--topic", default=SQL, metavar="SET", help=topics)
    add("--new", type=int, default=10, metavar="N", help="its first prompts, to measure (10)")
    add("--target", default="smollm2", metavar="DIR|GGUF|NAME", help="default: smollm2")
    add("--head", type=Path, required=True, metavar="DIR", help="of asyncspec train-head")
    add("--stages", type=int, default=2, metavar="N", help="verify stages (2)")
    add("--stage-seconds", type=float, default=0.02, metavar="S", help="of a pass at least (.02)")
    add("--draft-seconds", type=float, default=0.005, metavar="S", help="of a level (.005)")
    # ``flow`` chooses trees, and whether there are any, by speeds that it measures: its tokens a
    # round differ between two clusters with one head.
    add("--policy", default="flowspec", metavar="P", help="default: flowspec")
    add("--tokens", type=int, default=96, metavar="N", help="of an answer (96)")
    add("--minutes", type=float, default=12.0, metavar="M", help="of learning (12)")
    add("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print. Exit code: 0."""
    check_numbers(options, new=COUNT, stages=COUNT, tokens=SEVERAL, minutes=SOME_SECONDS)
    check_numbers(options, stage_seconds=SECONDS, draft_seconds=SECONDS)
    check_policies([options.policy])
    if not (options.head / "config.json").is_file():
        raise UserError(f"--head: {options.head} has no config.json; give a head's folder")
    texts = _texts(options)
    if len(texts) <= options.new:
        raise UserError(f"--new: the set has {len(texts)} prompts; leave some to learn from")
    options.target = target_of(options.target)
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        figures = asyncio.run(_measure(options, texts[options.new :], texts[: options.new]))
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        print_rows(options, [{"": f"{name}: {value}"} for name, value in figures.items()])
    return 0


def _texts(options: argparse.Namespace) -> list[str]:
    """The questions of the topic, first those to measure."""
    if options.topic == SQL and options.prompts is None:
        return sql_questions(options.new, 100)
    if options.prompts is None:
        raise UserError(f"--topic {options.topic} is a set of --prompts; give its folder")
    sets = read_sets(options.prompts, 10**6)
    if options.topic not in sets:
        raise UserError(f"--topic: {options.topic} is none of {', '.join(sets)}")
    return [prompt.text for prompt in sets[options.topic]]


class Answer(Struct, frozen=True):
    """What a request brought. ``seconds`` as its user sees them."""

    tokens: tuple[int, ...]
    stats: Mapping[str, float]
    seconds: float
    first_seconds: float


class _Served:
    """A running cluster."""

    def __init__(self, client: Client, tokens: int) -> None:
        self._client, self._tokens = client, tokens

    async def ask(self, text: str, temperature: float, seed: int) -> Answer:
        chat = encode_chat([ChatText("user", text)])
        submit = Submit(0, "", self._tokens, seed, temperature, 0, 1.0, chat=chat)
        began, first, tokens = time.perf_counter(), 0.0, list[int]()
        async for event in self._client.ask(submit):
            if isinstance(event, Output) and event.token_ids:
                first = first or time.perf_counter() - began
                tokens += event.token_ids
        assert isinstance(event, Finished)
        if event.reason == "error":
            raise UserError(event.detail)
        return Answer(tuple(tokens), event.stats, time.perf_counter() - began, first)

    async def ask_all(self, requests: Sequence[tuple[str, float, int]]) -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def asked(text: str, temperature: float, seed: int) -> None:
            async with room:
                await self.ask(text, temperature, seed)

        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(asked(*request))

    async def totals(self) -> Mapping[str, float]:
        return next(node.totals for node in await self._client.nodes() if node.rank == DRAFT)


@asynccontextmanager
async def _serving(options: argparse.Namespace, *, learn: bool) -> AsyncIterator[_Served]:
    config = local_config(
        TargetTable(options.target),
        DraftTable(f"eagle:{options.head.absolute()}", options.policy, learn=learn),
        *(options.stages, 1),
        stage_pace=PaceTable(seconds=options.stage_seconds),
        draft_pace=PaceTable(level_seconds=options.draft_seconds),
    )
    async with LocalCluster(config, lambda report: None) as cluster:
        host, port = cluster.address
        async with await Client.connect(host, port, config.cluster.name) as client:
            yield _Served(client, options.tokens)


async def _measure(
    options: argparse.Namespace, known: Sequence[str], new: Sequence[str]
) -> Mapping[str, float]:
    async with _serving(options, learn=False) as plain, _serving(options, learn=True) as learns:
        _say(f"{len(known)} prompts to learn from")
        requests = [(*asked, seed) for seed, asked in enumerate(product(known, TEMPERATURES))]
        await learns.ask_all(requests)
        learner = _learner()
        pairs = await _pairs(options, plain, learns, known, learner)
        totals = await learns.totals()
        learner.suspend()
        _say(f"{len(new)} new prompts")
        asked = [*product(new, TEMPERATURES)]
        measured = [
            await _pair(plain, learns, text, temperature, seed)
            for seed, (text, temperature) in enumerate(asked)
        ]
        learner.resume()
    if changed := sum(old.tokens != now.tokens for old, now in (*pairs, *measured)):
        raise UserError(f"{changed} answers are others with learning than without: a bug")
    figures: dict[str, float] = {}
    for place, temperature in enumerate(TEMPERATURES):
        some = measured[place :: len(TEMPERATURES)]
        old, now = (_a_round(answers) for answers in zip(*some, strict=True))
        at = f"tokens a round at temperature {temperature:g}"
        figures |= {f"{at}, before": old, f"{at}, after": now, f"{at}, times": now / old}
    return figures | {
        "new prompts, each at both temperatures": len(new),
        "answers in memory, to learn from and held out": int(totals.get("learned_answers", 0)),
        "seconds trained and measured": round(totals.get("learned_seconds", 0)),
        "versions that took over": int(totals.get("learned_version", 0)),
        **{
            f"guessed in a row on held-out answers, {when} the last change": totals[
                f"learned_{when}"
            ]
            for when in ("before", "after")
            if f"learned_{when}" in totals
        },
        "answers that changed": changed,
        "answers compared": len(pairs) + len(measured),
        "pairs whose latencies count": len(pairs),
        **dict(_latencies(pairs)),
    }


Pair = tuple[Answer, Answer]
"""Answers to one prompt without learning, and with it."""


async def _pair(plain: _Served, learns: _Served, text: str, temperature: float, seed: int) -> Pair:
    """Without training beside it; every other one in the other order."""
    clusters = (learns, plain) if seed // len(TEMPERATURES) % 2 else (plain, learns)
    answers = {cluster: await cluster.ask(text, temperature, seed) for cluster in clusters}
    return answers[plain], answers[learns]


async def _pairs(
    options: argparse.Namespace,
    plain: _Served,
    learns: _Served,
    known: Sequence[str],
    learner: psutil.Process,
) -> list[Pair]:
    pairs: list[Pair] = []
    end = time.monotonic() + 60 * options.minutes
    for number in count():
        if time.monotonic() > end:
            return pairs
        # Prompts that neither cluster has in its cache.
        text = f"{number + 1}. {known[number % len(known)]}"
        trained, answers = 0.0, dict[bool, Answer]()
        for learning in (True, False) if number % 2 else (False, True):
            if not learning:
                learner.suspend()
            spent = sum(learner.cpu_times()[:2])
            await asyncio.sleep(GAP)
            if learning:
                trained = (sum(learner.cpu_times()[:2]) - spent) / GAP
            answers[learning] = await (learns if learning else plain).ask(text, 0.0, 0)
            learner.resume()
        if trained >= TRAINING:
            pairs.append((answers[False], answers[True]))
        _say(f"pair {number + 1}: the learner had {trained:.0%} of a core, {len(pairs)} count")
        await asyncio.sleep(REST)
    raise AssertionError


def _learner() -> psutil.Process:
    """The learner's process, which its node starts."""
    for process in psutil.Process().children(recursive=True):
        if LEARNER in process.cmdline():
            return process
    raise UserError("no learner runs; its node's log says why")


def _latencies(pairs: Sequence[Pair]) -> Iterator[tuple[str, float]]:
    """Medians of the ratios of pairs, with learning over without."""
    measures: dict[str, Callable[[Answer], float]] = {
        "latency": lambda answer: answer.seconds,
        "first token": lambda answer: answer.first_seconds,
        "seconds a round": lambda answer: answer.stats["decode_seconds"] / _rounds(answer),
    }
    for name, measure in measures.items():
        ratios = sorted(measure(there) / measure(here) for here, there in pairs)
        if ratios:
            quarter = len(ratios) // 4
            yield f"{name}, times", median(ratios)
            yield f"{name}, lower quartile", ratios[quarter]
            yield f"{name}, upper quartile", ratios[-1 - quarter]


def _rounds(answer: Answer) -> float:
    return max(1.0, answer.stats["rounds"])


def _a_round(answers: Sequence[Answer]) -> float:
    """Tokens a round over some answers together."""
    tokens = sum(answer.stats["new_tokens"] - 1 for answer in answers)
    return tokens / sum(map(_rounds, answers))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
