"""Real processes with a disk cache, all killed at once: the next turn reads what is new."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec.core.kept_states import kept_state
from asyncspec.core.prefix_keys import prefix_keys
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import CacheTable, Config, DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from asyncspec_protocol.limits import PREFIX_UNIT
from asyncspec_protocol.messages import Output, Submit
from backend.gguf_models import convert
from nodes.background import Background, no_process_left

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.slow]

PROMPT = tuple(3 + (7 * i) % 90 for i in range(400))
BORDER = kept_state(len(PROMPT), 0)
NEW = (5, 6, 7, 8)


async def answer(
    cluster: Background, prompt: tuple[int, ...], tenant: str = ""
) -> tuple[tuple[int, ...], int]:
    """The tokens of a greedy answer, and how many of the prompt were not read."""
    tokens: list[int] = []
    shared = 0
    where = ClusterAddress(*cluster.cluster.address, cluster.name)
    async with await where.connect() as client:
        submit = Submit(0, "", 20, 0, 0.0, 0, 1.0, prompt_ids=prompt, tenant=tenant)
        async for part in client.ask(submit):
            if isinstance(part, Output):
                tokens += part.token_ids
                shared = max(shared, part.shared_tokens)
    return tuple(tokens), shared


def _copies(folder: Path, name: str) -> int:
    return len([*folder.rglob(f"{name}.kv")])


async def stored(cluster: Background, folder: Path, text: tuple[int, ...], stages: int) -> None:
    """Wait until every stage has stored a text, but for its last tokens that make no unit."""
    last = prefix_keys(text)[-1].hex()
    where = ClusterAddress(*cluster.cluster.address, cluster.name)
    async with await where.connect() as client:
        while _copies(folder, last) < stages:
            await client.nodes()


async def kill_in_an_answer(cluster: Background, config: Config) -> None:
    """Kill all processes while an answer is written, and its prompt has been stored."""
    where = ClusterAddress(*cluster.cluster.address, cluster.name)
    async with await where.connect() as client:
        parts = client.ask(Submit(0, "", 600, 0, 0.0, 0, 1.0, prompt_ids=PROMPT))
        await anext(parts)
        await stored(cluster, Path(config.cache.folder), PROMPT[:BORDER], config.stages)
        kill(cluster)


def kill(cluster: Background) -> None:
    for pid in cluster.cluster.pids:
        os.kill(pid, signal.SIGKILL)


def check(config: Config) -> None:
    """Answers begin after a kill of all processes, in the middle of the first one and before the
    second turn, and have the text of one that begins anew, as those of another tenant do."""
    folder = Path(config.cache.folder)
    with no_process_left():
        cluster = Background(config)
        asyncio.run(kill_in_an_answer(cluster, config))
        cluster.close()
        cluster = Background(config)
        first, shared = asyncio.run(answer(cluster, PROMPT))
        text = PROMPT + first
        asyncio.run(stored(cluster, folder, text[:-1], config.stages))
        kill(cluster)
        cluster.close()
        assert shared == BORDER
        cluster = Background(config)
        second, shared = asyncio.run(answer(cluster, text + NEW))
        apart, none = asyncio.run(answer(cluster, text + NEW, tenant="another"))
        cluster.close()
    held = (len(text) - 1) // PREFIX_UNIT * PREFIX_UNIT
    assert (second, shared, none) == (apart, held, 0)


def with_disk(table: TargetTable, folder: Path) -> Config:
    config = local_config(table, DraftTable("ngram"), 2, 2)
    return replace(config, cache=CacheTable(disk_mib=64, folder=str(folder)))


def test_a_checkpoint(tmp_path: Path) -> None:
    check(with_disk(TargetTable(str(BUNDLED_TARGET)), tmp_path / "disk"))


def test_a_gguf_file(tmp_path: Path) -> None:
    model = convert(BUNDLED_TARGET, tmp_path / "target-Q8_0.gguf", "Q8_0")
    check(with_disk(TargetTable(str(model)), tmp_path / "disk"))
