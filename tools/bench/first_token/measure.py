"""Every prompt read by every reader in turn."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import aiohttp

from asyncspec_nodes.cluster.config import DraftTable, PaceTable, TargetTable
from asyncspec_nodes.local.cluster import LocalCluster, local_config
from tools.bench.first_token import beside
from tools.bench.first_token.readers import (
    POLICY,
    Alone,
    FirstToken,
    Ours,
    Reader,
    peak_mib,
    read_with_load,
)
from tools.bench.first_token.rows import Row, rows
from tools.bench.first_token.served import SPIN_SECONDS, rpc_pipeline, vllm_alone
from tools.bench.first_token.setting import WARM_UP, Entry, Setting
from tools.testbed.bed import Bed
from tools.testbed.cluster import BedCluster
from tools.testbed.tables import Description, DeviceTable, NetworkTable

MIN_DEVICES = 2
"""Of a bed."""

Tick = Callable[[str], None]


async def measure(setting: Setting, tick: Tick, note: Tick) -> list[Row]:
    """All lengths, the shortest first, as memory counts from the start. ``note`` receives what of
    the links does not hold here. Raises ``AsyncSpecError``, also where a reader fails."""
    table: list[Row] = []
    async with AsyncExitStack() as stack:
        readers = await _readers(setting, stack, tick, note)
        prompts = _prompts(setting.vocab)
        for reader in readers.values():
            await reader.read(next(prompts)(min(*setting.repeats, WARM_UP) - 1))
        for length, repeats in sorted(setting.repeats.items()):
            answers: dict[Entry, list[FirstToken]] = {entry: [] for entry in readers}
            for repeat in range(repeats):
                prompt = next(prompts)(length - 1)
                for entry, reader in readers.items():
                    tick(f"{length} tokens, repeat {repeat + 1}, {setting.name(entry)}")
                    answers[entry].append(await read_with_load(reader, prompt))
                    if entry.kind == "vllm":
                        await asyncio.sleep(SPIN_SECONDS)
            peaks = {entry: peak_mib(reader) for entry, reader in readers.items()}
            held_up = {}
            for entry, reader in readers.items() if setting.beside else ():
                if isinstance(reader, Ours):
                    prompt, other = next(prompts)(length - 1), next(prompts)(WARM_UP)
                    tick(f"{length} tokens beside a stream, {setting.name(entry)}")
                    held_up[entry] = await beside.measure(reader, prompt, other, setting.beside)
            table += rows(setting, length - 1, answers, peaks, held_up)
    return table


async def _readers(
    setting: Setting, stack: AsyncExitStack, tick: Tick, note: Tick
) -> dict[Entry, Reader]:
    """Start all of them; they end with ``stack``. Raises ``AsyncSpecError``."""
    readers: dict[Entry, Reader] = {}
    # All beds first, and ours last: while a bed is made links of clusters are not heard.
    beds = {entry: _bed(setting, entry, stack, note) for entry in setting.entries()}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncspec-prompts-")))
    session = await stack.enter_async_context(aiohttp.ClientSession())
    for entry in sorted(beds, key=lambda entry: entry.kind == "stages"):
        tick(f"starting {setting.name(entry)}")
        bed, count = beds[entry], entry.count
        log = folder / f"{entry.kind}-{count}-{entry.mbit:g}.log"
        match entry.kind:
            case "alone":
                readers[entry] = stack.enter_context(closing(Alone(setting, count)))
            case "rpc":
                assert bed is not None
                child = await rpc_pipeline(setting, count, bed, log)
                readers[entry] = stack.enter_context(closing(child))
            case "vllm":
                assert bed is not None
                readers[entry] = await vllm_alone(setting, count, bed, log, session)
            case "stages":
                readers[entry] = await _cluster(setting, count, bed, stack)
    return {entry: readers[entry] for entry in beds}


def _bed(setting: Setting, entry: Entry, stack: AsyncExitStack, note: Tick) -> Bed | None:
    """Devices for a server, a pipeline's first device being that of its server or draft node; none
    for what has no server and no links of a given rate."""
    if entry.kind == "alone" or (entry.kind == "stages" and not entry.mbit):
        return None
    devices = entry.count + 1 if entry.pipeline else MIN_DEVICES
    network = NetworkTable(mbit=entry.mbit or None)
    description = Description(device=(DeviceTable(),) * devices, network=network)
    bed = stack.enter_context(Bed.open(description, setting.network if entry.mbit else "loopback"))
    for text in bed.notes:
        note(text)
    return bed


async def _cluster(setting: Setting, stages: int, bed: Bed | None, stack: AsyncExitStack) -> Ours:
    seconds = setting.stage_seconds
    config = local_config(
        TargetTable(path=str(setting.target.absolute()), dtype=setting.dtype, mode=setting.mode),
        DraftTable(source="none", policy=POLICY),
        stages,
        2 if setting.beside else 1,
        stage_pace=PaceTable(seconds=seconds) if seconds else None,
        context=setting.slots,
    )
    cluster = BedCluster(bed, config, lambda report: None) if bed else None
    return await Ours.open(cluster or LocalCluster(config, lambda report: None), stack)


def _prompts(vocab: int) -> Iterator[Callable[[int], list[int]]]:
    """Endless prompts of random tokens, none of which begins like another."""
    dice = random.Random(0)
    while True:
        yield lambda length: [dice.randrange(3, vocab) for _ in range(length)]
