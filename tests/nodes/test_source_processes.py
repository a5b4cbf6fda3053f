"""A token source as a process of its own that several draft nodes share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_protocol.messages import Status
from nodes.background import no_process_left
from nodes.test_draft_processes import PROMPTS, TOKENS, Shared
from nodes.test_processes import generate

# Six processes load torch.
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.torch, pytest.mark.timeout(300)]

AT_HOME = 2


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    with no_process_left():
        found = Shared(tmp_path, (None, None, "ngram"), apart=True)
        yield found
        found.close()


def test_draft_nodes_share_a_source(shared: Shared) -> None:
    """Two of them do, the third one drafts by itself; the second is killed on the way."""

    async def main() -> tuple[Status, ...]:
        begun, seen = asyncio.Event(), asyncio.Event()
        # The default policy may find that a source that other programs keep waiting does not pay.
        ends = await asyncio.gather(
            *(shared.ask(n, PROMPTS[n], TOKENS, seen, "flowspec") for n in range(3))
        )
        assert shared.undisturbed(ends)
        assert [end.reason for end in ends] == ["length"] * 3
        assert shared.drafted(ends)
        nodes = await shared.nodes(0)
        doomed = asyncio.create_task(shared.ask(1, PROMPTS[1], 1500, begun, doomed=True))
        others = [
            asyncio.create_task(shared.ask(n, PROMPTS[n], 2 * TOKENS, seen)) for n in (0, AT_HOME)
        ]
        await begun.wait()
        shared.drafts[1].process.kill()
        with pytest.raises(ClusterError, match="is gone"):
            await doomed
        ends = await asyncio.gather(*others)
        assert shared.undisturbed(ends)
        assert [end.reason for end in ends] == ["length"] * 2
        return nodes

    nodes = asyncio.run(main())
    (source,) = (status for status in nodes if status.role == "source")
    assert sorted(source.peers) == [0, 1001]
    # It has done what the draft nodes have asked it for.
    assert source.busy_seconds > 0
    for number, count in ((0, 2 * TOKENS), (AT_HOME, 2 * TOKENS)):
        assert shared.tokens[number] == generate(BUNDLED_TARGET, PROMPTS[number], count)[0]
    whole = generate(BUNDLED_TARGET, PROMPTS[1], len(shared.tokens[1]))[0]
    assert shared.tokens[1] == whole
