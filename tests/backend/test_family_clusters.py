"""Every family in clusters of one, two and four stages: plain decoding, chains and trees write what
transformers' own ``generate`` does, also where a stage loses its sessions on the way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from asyncspec.backend.base import LoadedSource
from asyncspec.core.jobs import Release
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.source.suffix import SuffixSource
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_protocol.ids import Rank, SessionId
from backend.hf_cluster import Loaded
from backend.matrix import BOUND, Interleaving
from backend.stage_cluster import StageCluster
from backend.tiny import FAMILIES, PLAIN, VOCAB, generated, save_tiny
from backend.twelve_requests import check_twelve
from cluster import ask
from effort import nightly

pytestmark = [pytest.mark.slow, pytest.mark.torch]

NEW = 14
POLICIES = ("autoregressive", "chain", "flow")
RECURRENT = ("qwen3.5", "lfm2", "nemotron-h", "falcon-h1", "kimi-linear")
OTHERS = [family for family in (*FAMILIES, *PLAIN) if family not in RECURRENT]


def run(path: Path, family: str, *, kill: bool = False) -> None:
    """Raises ``AssertionError`` where a text differs."""
    random = Random(family)
    prompt = [random.randrange(3, 150) for _ in range(20)]
    want = generated(path, prompt, NEW)
    # An earlier answer that is mostly right: some drafts come true and some do not.
    remembered = [*prompt, *want]
    for place in range(len(prompt) + 4, len(remembered), 5):
        remembered[place] = (remembered[place] + 1) % VOCAB
    loaded, hits = Loaded(open_checkpoint(path), "float32"), 0
    for number, stages in enumerate((1, 2, 4)):
        for policy in POLICIES:
            source = SuffixSource()
            source.earlier.add("", remembered)
            cluster = StageCluster(
                Interleaving(number), loaded, LoadedSource(source), stages=stages, prefill_rows=8
            )
            cluster.submit(ask(prompt=tuple(prompt), max_new_tokens=NEW, policy=policy, tenant=""))
            if kill:
                _lose_last_stage(cluster)
            cluster.world.run(until=BOUND)
            assert cluster.world.tokens[0] == want, f"{policy} on {stages} stages"
            hits += int(cluster.world.finished[0].stats["hits"])
            _release(cluster, *range(1, stages + 1))
    assert hits, "nothing was drafted"


def _lose_last_stage(cluster: StageCluster) -> None:
    """Once it has written a few tokens."""
    world, last = cluster.world, Rank(cluster.stages)

    def look() -> None:
        if len(world.tokens.get(0, ())) < NEW // 2:
            world.at(world.now + 1, look)
            return
        _release(cluster, last)
        world.restart(last, cluster.stage(last))
        world.at(world.now + 3, cluster.connect_all)

    world.at(1.0, look)


def _release(cluster: StageCluster, *ranks: int) -> None:
    """Forget what stages, which clusters share, know of sessions."""
    for rank in ranks:
        stage = cluster.loaded.cut(cluster.stages)[rank - 1]
        for session in list(stage._sessions):
            stage.run(Release(SessionId(session)))


@pytest.mark.parametrize("family", [*RECURRENT, *(nightly(family) for family in OTHERS)])
def test_clusters_write_what_generate_does(family: str, tiny: Callable[..., Path]) -> None:
    run(tiny(family), family)


@pytest.mark.parametrize("family", RECURRENT)
def test_a_stage_that_lost_its_states_reads_the_text_again(
    family: str, tiny: Callable[..., Path]
) -> None:
    run(tiny(family), family, kill=True)


@pytest.mark.asyncio
@pytest.mark.processes
@pytest.mark.parametrize("family", ["falcon-h1", "kimi-linear"])
async def test_twelve_at_once_and_after_a_kill(family: str, tmp_path: Path) -> None:
    path = save_tiny(tmp_path, family, vocab_size=1024)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_TARGET / name, path)
    await check_twelve(path)
