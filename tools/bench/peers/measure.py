"""Asking every peer, interleaved."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from msgspec import Struct

from asyncspec.core.errors import ClusterError
from tools.bench.limits.progress import Tick
from tools.bench.peers import llama_cpp, ours, vllm
from tools.bench.peers.comparison import Comparison
from tools.bench.peers.endpoint import Endpoint
from tools.bench.peers.generate import ALL, BASE, ONE, WAYS, Generate, Whole
from tools.bench.peers.peer import Answer, Peer
from tools.bench.peers.ratios import Standing, differs, standings
from tools.testbed.bed import Bed

WARM_UP_TOKENS = 8


class Found(Struct, frozen=True):
    """What a run has measured."""

    standings: list[Standing]
    # What does not hold, and whose texts differ; a sentence each.
    notes: tuple[str, ...]


async def measure(comparison: Comparison, target: Path, folder: Path, tick: Tick) -> Found:
    """Start all peers, ask them, end them; ``folder`` takes the logs. ``target`` is the
    comparison's, enlarged or not. Raises ``AsyncSpecError``."""
    async with AsyncExitStack() as stack:
        bed = stack.enter_context(Bed.open(comparison.generate_bed(), comparison.network))
        original = await _original(comparison, bed, folder)
        # These load while ours do.
        generates = _generates(comparison, target, bed, folder, stack)
        beds = [bed]
        own = await start_ours(comparison, target, comparison.draft, beds, stack)
        peers: list[Peer] = [*own, *generates]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        peers += [Endpoint(engine, session) for engine in comparison.engines]
        if comparison.llama_cpp is not None:
            # In a thread: meanwhile our own cluster's links want to be heard.
            models = await asyncio.to_thread(
                llama_cpp.converted,
                comparison.llama_cpp,
                target,
                comparison.draft,
                folder,
                comparison.gguf,
            )
            peers += await llama_cpp.start(comparison, models, folder, session, stack)
            peers += await start_ours(comparison, models.target, models.draft, beds, stack)
        if comparison.vllm is not None:
            peers += await vllm.start(comparison, target, folder, session, stack)
        for peer in peers:
            await peer.answer(comparison.prompts[0], WARM_UP_TOKENS)
            tick()
        found, strays = await ask_all(peers, comparison, tick)
    notes = [note for bed in beds for note in bed.notes]
    if comparison.stage_seconds:
        notes.append("the stages of pipelines keep a pace; generate and single devices do not")
    if not all(bed.limited for bed in beds):
        notes.append("no quota holds: every peer has had the whole machine")
    elif comparison.all_cores > (os.cpu_count() or 1):
        notes.append(f"together the devices want more cores than the {os.cpu_count()} there are")
    if original:
        same = [not differs(*pair) for pair in zip(original, found[BASE][0], strict=True)]
        notes.append(
            f"the enlarged target writes the original's text in {sum(same)} of {len(same)} answers"
        )
    asked = comparison.repeats * len(comparison.prompts)
    notes += [f"{name} wrote another text in {n} of {asked} answers" for name, n in strays.items()]
    cores = {peer.name: peer.cores for peer in peers}
    return Found(standings(found, cores, BASE), tuple(dict.fromkeys(notes)))


async def _original(comparison: Comparison, bed: Bed, folder: Path) -> list[Answer]:
    """What the target writes to each prompt before it is enlarged; nothing where it is not."""
    if comparison.size is None:
        return []
    models = comparison.target, comparison.draft
    with Whole.start(bed, 1, *models, folder, comparison.device) as whole:
        tokens = comparison.tokens
        return [await whole.ask(prompt, tokens, "plain") for prompt in comparison.prompts]


async def start_ours(
    comparison: Comparison, target: Path, draft: Path, beds: list[Bed], stack: AsyncExitStack
) -> list[ours.Ours]:
    """A cluster for each source, on a bed of its own, which is added to ``beds``."""
    # All of them first: while one is opened the clusters' links are not heard.
    own = [
        stack.enter_context(Bed.open(comparison.our_bed(), comparison.network))
        for _ in comparison.sources
    ]
    beds += own
    started: list[ours.Ours] = []
    for source, bed in zip(comparison.sources, own, strict=True):
        started += await ours.start(comparison, target, draft, bed, stack, source)
    return started


def _generates(
    comparison: Comparison, target: Path, bed: Bed, folder: Path, stack: AsyncExitStack
) -> list[Generate]:
    peers = []
    for device, (words, cores) in enumerate(((ONE, comparison.cpu), (ALL, comparison.all_cores))):
        whole = stack.enter_context(
            Whole.start(bed, device, target, comparison.draft, folder, comparison.device)
        )
        peers += [Generate(whole, way, words, cores if bed.limited else None) for way in WAYS]
    return peers


async def ask_all(
    peers: Sequence[Peer], comparison: Comparison, tick: Tick
) -> tuple[dict[str, list[list[Answer]]], Counter[str]]:
    """Each repeat asks every peer once per prompt. The answers, by peer; and how many were another
    text, by peer. Raises ``AsyncSpecError``, also where a peer that must not has another text."""
    found: dict[str, list[list[Answer]]] = {peer.name: [] for peer in peers}
    strays: Counter[str] = Counter()
    for _ in range(comparison.repeats):
        for answers in found.values():
            answers.append([])
        for prompt in comparison.prompts:
            for peer in peers:
                found[peer.name][-1].append(await peer.answer(prompt, comparison.tokens))
                tick()
            now = {peer.name: found[peer.name][-1][-1] for peer in peers}
            strays.update(_strays(peers, now))
    return found, strays


def _strays(peers: Sequence[Peer], answers: dict[str, Answer]) -> list[str]:
    """Whose answer to one prompt is another text. The base, which knows token ids and text, is what
    all are compared with; ours must be the same as it. Raises ``ClusterError``."""
    strays = []
    for peer in peers:
        if differs(answers[peer.name], answers[BASE]):
            if peer.exact:
                raise ClusterError(f"{peer.name} wrote another text than {BASE}")
            strays.append(peer.name)
    return strays
