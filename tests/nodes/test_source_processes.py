"""A token source as a process of its own that several draft nodes share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from asyncspec.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_protocol.messages import Status
from nodes.test_draft_processes import PROMPTS, TOKENS, Shared
from nodes.test_processes import generate

# Six processes load torch.
pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.timeout(300)]

AT_HOME = 2


def test_draft_nodes_share_a_source(tmp_path: Path) -> None:
    """Two of them do, the third one drafts by itself; the second is killed on the way."""
    shared = Shared(tmp_path, (None, None, "ngram"), apart=True)

    async def main() -> tuple[Status, ...]:
        begun, seen = asyncio.Event(), asyncio.Event()
        for end in await asyncio.gather(
            *(shared.ask(number, PROMPTS[number], TOKENS, seen) for number in range(3))
        ):
            assert (end.reason, end.stats["sessions"]) == ("length", 1)
            assert end.stats["drafted_nodes"] > 0
        nodes = await shared.nodes(0)
        doomed = asyncio.create_task(shared.ask(1, PROMPTS[1], 1500, begun))
        others = [
            asyncio.create_task(shared.ask(n, PROMPTS[n], 2 * TOKENS, seen)) for n in (0, AT_HOME)
        ]
        await begun.wait()
        shared.drafts[1].process.kill()
        with pytest.raises(ClusterError, match="is gone"):
            await doomed
        for end in await asyncio.gather(*others):
            assert (end.reason, end.stats["sessions"]) == ("length", 1)
        return nodes

    try:
        nodes = asyncio.run(main())
        (source,) = (status for status in nodes if status.role == "source")
        assert sorted(source.peers) == [0, 1001]
        # It has done what the draft nodes have asked it for.
        assert source.busy_seconds > 0
        for number, count in ((0, 2 * TOKENS), (AT_HOME, 2 * TOKENS)):
            assert shared.tokens[number] == generate(BUNDLED_TARGET, PROMPTS[number], count)[0]
        whole = generate(BUNDLED_TARGET, PROMPTS[1], len(shared.tokens[1]))[0]
        assert shared.tokens[1] == whole
    finally:
        shared.close()
    assert psutil.Process().children(recursive=True) == []
