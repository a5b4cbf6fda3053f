"""The measurements of a service under load measure what they say; how fast is not asked here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.serving import fairness, memory
from tools.bench.serving.parts import PARTS
from tools.bench.serving.service import served

pytestmark = pytest.mark.nightly


def _small(target: Path = BUNDLED_TARGET) -> Config:
    return local_config(TargetTable(path=str(target)), DraftTable(source="ngram"), 1, 4)


@pytest.mark.asyncio
@pytest.mark.parametrize("gguf", [False, True])
async def test_the_figures_of_a_service(gguf: bool, tmp_path: Path) -> None:
    target = BUNDLED_TARGET
    if gguf:
        gguf_models: Any = pytest.importorskip("backend.gguf_models")
        target = gguf_models.convert(target, tmp_path / "target.gguf", "Q8_0")
    async with served(_small(target)) as service:
        fair = await fairness.measure(service, streams=3, tokens=12)
        assert max(fair.tokens) == 12
        assert 0 <= fair.least_share <= 1  # a busy machine may starve one of so short streams
        kept = await memory.measure(service, warm_up=1, counts=(2, 5))
        assert set(kept.idle) == {"rank 0", "rank 1", "http"}
        assert list(kept.after) == [2, 5]
        assert kept.growth(5) > 0.5
        assert not any((await service.settled()).values())
        for part, found in (("fairness", fair), ("memory", kept)):
            assert PARTS[part].page(found)
            assert PARTS[part].figures(found)
