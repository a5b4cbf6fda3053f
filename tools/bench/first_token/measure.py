"""Every prompt read by every reader in turn, and how ours compare with the engine alone."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path

from msgspec import Struct

from asyncspec.backend.base import DType, Mode
from asyncspec.backend.registry import LLAMA, backend_name
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from tools.bench.first_token import beside
from tools.bench.first_token.readers import POLICY, Alone, FirstToken, Ours, Reader, peak_mib

WARM_UP = 160
"""Tokens of the first prompts, which nobody times: passes of every size set something up."""


class Setting(Struct, frozen=True):
    """What is compared."""

    target: Path
    vocab: int
    dtype: DType
    mode: Mode
    lengths: tuple[int, ...]
    stages: tuple[int, ...]
    repeats: int
    # Tokens of the stream beside which one more prompt is read; 0: there is none.
    beside: int = 0
    # Whether this CPU computes with repacked weights of a GGUF file.
    repacked: bool = False

    @property
    def engine(self) -> str:
        """Its name in ``alone_child.py``."""
        return "llama" if backend_name(str(self.target)) == LLAMA else "hf"

    @property
    def weights(self) -> str:
        """Their dtype or layout there."""
        return "repacked" if self.repacked else self.dtype

    def threads(self, stages: int) -> int:
        """Of the engine alone that so many stages of one thread are compared with."""
        return min(stages, os.cpu_count() or 1)


class Row(Struct, frozen=True):
    """One reader with prompts of one length: medians over the repeats."""

    target: str
    dtype: str
    mode: str
    tokens: int
    reader: str
    threads: int
    first_token_seconds: float
    prompt_per_second: float
    # Of prompt tokens a second, to those of the engine alone with as many threads within one
    # repeat: median, least, most.
    ratio: float
    least: float
    most: float
    # Of the same repeats: how often its first token was that of the engine alone.
    same_token: int
    repeats: int
    peak_mib: float
    # P95 of the seconds between a stream's tokens beside a prompt over that without; 0: not
    # measured.
    beside: float = 0.0


def context(lengths: Sequence[int], beside: int) -> int:
    """Tokens of the longest prompt and its answer."""
    return max(*lengths, WARM_UP + beside)


Tick = Callable[[str], None]


async def measure(setting: Setting, tick: Tick) -> list[Row]:
    """All lengths, the shortest first, as memory counts from the start. Raises ``AsyncSpecError``,
    also where a reader fails."""
    slots = context(setting.lengths, setting.beside)
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        alone = {
            threads: stack.enter_context(
                closing(Alone(setting.engine, setting.target, setting.weights, threads, slots))
            )
            for threads in sorted({setting.threads(count) for count in setting.stages})
        }
        clusters = {count: await _cluster(setting, count, stack) for count in setting.stages}
        readers: dict[tuple[str, int], Reader] = {("alone", n): alone[n] for n in alone}
        readers |= {("stages", count): clusters[count] for count in clusters}
        prompts = _prompts(setting.vocab)
        for reader in readers.values():
            await reader.read(next(prompts)(min(*setting.lengths, WARM_UP) - 1))
        for length in sorted(setting.lengths):
            answers: dict[tuple[str, int], list[FirstToken]] = {name: [] for name in readers}
            for _ in range(setting.repeats):
                prompt = next(prompts)(length - 1)
                for name, reader in readers.items():
                    answers[name].append(await reader.read(prompt))
                    tick(f"{length} tokens, {_name(setting, name)}")
            held_up = {}
            for count, cluster in clusters.items() if setting.beside else ():
                prompt, other = next(prompts)(length - 1), next(prompts)(WARM_UP)
                held_up[count] = await beside.measure(cluster, prompt, other, setting.beside)
                tick(f"{length} tokens beside a stream, {count} stages")
            rows += _rows(setting, length, answers, readers, held_up)
    return rows


async def _cluster(setting: Setting, stages: int, stack: AsyncExitStack) -> Ours:
    target = TargetTable(path=str(setting.target), dtype=setting.dtype, mode=setting.mode)
    draft = DraftTable(source="none", policy=POLICY)
    sessions = 2 if setting.beside else 1
    config = local_config(
        target, draft, stages, sessions, context=context(setting.lengths, setting.beside)
    )
    return await Ours.open(LocalCluster(config, lambda report: None), stack)


def _prompts(vocab: int) -> Iterator[Callable[[int], list[int]]]:
    """Endless prompts of random tokens, none of which begins like another."""
    dice = random.Random(0)
    while True:
        yield lambda length: [dice.randrange(3, vocab) for _ in range(length)]


def _name(setting: Setting, name: tuple[str, int]) -> str:
    kind, count = name
    if kind == "stages":
        return f"{count} stage{'s' * (count > 1)}"
    return {"hf": "transformers", "llama": "llama.cpp"}[setting.engine]


def _rows(
    setting: Setting,
    length: int,
    answers: Mapping[tuple[str, int], Sequence[FirstToken]],
    readers: Mapping[tuple[str, int], Reader],
    held_up: Mapping[int, float],
) -> Iterator[Row]:
    for (kind, count), own in answers.items():
        threads = count if kind == "alone" else setting.threads(count)
        base = answers["alone", threads]
        pairs = list(zip(base, own, strict=True))
        ratios = [alone.seconds / ours.seconds for alone, ours in pairs]
        seconds = statistics.median(answer.seconds for answer in own)
        yield Row(
            setting.target.name,
            setting.dtype,
            setting.mode,
            length - 1,
            _name(setting, (kind, count)),
            threads,
            round(seconds, 3),
            round((length - 1) / seconds, 1),
            round(statistics.median(ratios), 3),
            round(min(ratios), 3),
            round(max(ratios), 3),
            sum(alone.token == ours.token for alone, ours in pairs),
            len(pairs),
            round(peak_mib(readers[kind, count])),
            round(held_up.get(count, 0.0), 2) if kind == "stages" else 0.0,
        )
