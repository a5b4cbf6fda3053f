"""Real processes with a disk cache, all killed at once: the next turn reads what is new."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec.core.kept_states import kept_state
from asyncspec.core.prefix_keys import prefix_keys
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster.checkpoints import BUNDLED_EAGLE, BUNDLED_TARGET
from asyncspec_nodes.cluster.config import CacheTable, Config, DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from asyncspec_protocol.limits import PREFIX_UNIT
from asyncspec_protocol.messages import FINAL, Output, Submit
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


def _copies(folder: Path, names: Sequence[str]) -> int:
    return sum(len([*folder.rglob(name)]) for name in names)


async def stored(cluster: Background, config: Config, text: tuple[int, ...]) -> None:
    """Wait until every stage has stored a text, but for its last tokens that make no unit."""
    await _until_copies(cluster, config, prefix_keys(text)[-1:], config.stages)


async def features_stored(
    cluster: Background, config: Config, text: tuple[int, ...], least: int
) -> None:
    """Wait until the draft node has stored the features of so many tokens of a text."""
    keys = prefix_keys(text, (FINAL,))[least // PREFIX_UNIT - 1 :]
    await _until_copies(cluster, config, keys, 1)


async def _until_copies(
    cluster: Background, config: Config, keys: Sequence[bytes], least: int
) -> None:
    where, folder = ClusterAddress(*cluster.cluster.address, cluster.name), config.cache.folder
    names = [f"{key.hex()}.kv" for key in keys]
    async with await where.connect() as client:
        while _copies(Path(folder), names) < least:
            await client.nodes()


async def kill_in_an_answer(cluster: Background, config: Config, *, featured: bool) -> None:
    """Kill all processes while an answer is written, and its prompt has been stored."""
    where = ClusterAddress(*cluster.cluster.address, cluster.name)
    async with await where.connect() as client:
        parts = client.ask(Submit(0, "", 600, 0, 0.0, 0, 1.0, prompt_ids=PROMPT))
        await anext(parts)
        await stored(cluster, config, PROMPT[:BORDER])
        if featured:
            await features_stored(cluster, config, PROMPT, BORDER)
        kill(cluster)


def kill(cluster: Background) -> None:
    for pid in cluster.cluster.pids:
        os.kill(pid, signal.SIGKILL)


def check(config: Config, *, featured: bool = False) -> None:
    """Answers begin after a kill of all processes, in the middle of the first one and before the
    second turn, and have the text of one that begins anew, as those of another tenant do."""
    with no_process_left():
        cluster = Background(config)
        asyncio.run(kill_in_an_answer(cluster, config, featured=featured))
        cluster.close()
        cluster = Background(config)
        first, shared = asyncio.run(answer(cluster, PROMPT))
        text = PROMPT + first
        asyncio.run(stored(cluster, config, text[:-1]))
        if featured:
            asyncio.run(features_stored(cluster, config, text, len(PROMPT)))
        kill(cluster)
        cluster.close()
        assert shared == BORDER
        cluster = Background(config)
        second, shared = asyncio.run(answer(cluster, text + NEW))
        apart, none = asyncio.run(answer(cluster, text + NEW, tenant="another"))
        cluster.close()
    held = (len(text) - 1) // PREFIX_UNIT * PREFIX_UNIT
    assert (second, none) == (apart, 0)
    # Of an answer's features some alone may be kept.
    assert shared == held or (featured and len(PROMPT) <= shared < held)


def with_disk(table: TargetTable, folder: Path, draft: str = "ngram") -> Config:
    config = local_config(table, DraftTable(draft), 2, 2)
    return replace(config, cache=CacheTable(disk_mib=64, folder=str(folder)))


def test_a_checkpoint(tmp_path: Path) -> None:
    check(with_disk(TargetTable(str(BUNDLED_TARGET)), tmp_path / "disk"))


def test_a_checkpoint_with_an_eagle_head(tmp_path: Path) -> None:
    table = TargetTable(str(BUNDLED_TARGET))
    check(with_disk(table, tmp_path / "disk", f"eagle:{BUNDLED_EAGLE}"), featured=True)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("draft", ["ngram", "eagle:toy"])
def test_a_chat_of_ten_turns_reads_what_is_new(tmp_path: Path, draft: str, killed: bool) -> None:
    """All ten turns over 3,600 tokens read at most 1.1 times the new tokens, also with a kill of
    every process before each."""
    config = with_disk(TargetTable("toy:attention=parent"), tmp_path / "disk", draft)
    prompt = tuple(3 + (i * i) % 90 for i in range(3600))
    read = new = 0
    with no_process_left():
        cluster = Background(config)
        for number in range(10):
            text, shared = asyncio.run(answer(cluster, prompt))
            read += len(prompt) - shared
            new += 20 if number else 3600
            if killed:
                asyncio.run(stored(cluster, config, (prompt + text)[:-1]))
                if draft == "eagle:toy":
                    least = len(prompt) - 1
                    asyncio.run(features_stored(cluster, config, prompt + text, least))
                kill(cluster)
                cluster.close()
                cluster = Background(config)
            prompt += text + tuple(3 + (number + i) % 90 for i in range(20))
        cluster.close()
    assert read <= 1.1 * new


def test_a_gguf_file(tmp_path: Path) -> None:
    model = convert(BUNDLED_TARGET, tmp_path / "target-Q8_0.gguf", "Q8_0")
    check(with_disk(TargetTable(str(model)), tmp_path / "disk"))
