"""Work that nobody waits for ends early and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from asyncspec.backend.draft_trie import Trie
from asyncspec.core.jobs import Admit, Forward, Row
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.attention.attention import AttentionParams, TreeMask
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.draft_model import load_draft
from asyncspec.plugins.hf.model.stage import HFStage
from asyncspec_protocol.ids import SegmentId, SessionId, Version
from asyncspec_protocol.messages import Expand
from backend.conformance import SESSION
from backend.probe import cut

pytestmark = pytest.mark.torch


def passed(start: int, tokens: Sequence[int]) -> Forward:
    """A pass over nodes in a row after ``start`` committed ones."""
    rows = tuple(
        Row(slot, slot, tuple(range(start, slot + 1))) for slot in range(start, start + len(tokens))
    )
    sampled_rows = tuple(range(len(tokens)))
    return Forward(SESSION, SegmentId(0), start, rows, tuple(tokens), sampled_rows=sampled_rows)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_pass_ends_between_two_layers(
    mode: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = cut(open_checkpoint(tiny("llama")), 1, mode=mode)  # type: ignore[arg-type]
    stage.run(Admit(SESSION, 64, Sampling()))
    alone = stage.run(passed(0, (1, 2, 3)))
    later = stage.run(passed(3, (4, 5)))
    layers = _abandon_in_layer(stage, 1, monkeypatch)
    assert stage.run(passed(3, (6, 7, 8))) == ()
    assert layers == [0, 1]
    monkeypatch.undo()
    assert stage.run(passed(3, (4, 5))) == later
    assert stage.run(passed(0, (1, 2, 3))) == alone


def _abandon_in_layer(stage: HFStage, last: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The next pass becomes useless while layer ``last`` runs; the layers that ran."""
    layers: list[int] = []
    attend = TreeMask.attend

    def watched(self: TreeMask, params: AttentionParams, *rest: torch.Tensor) -> torch.Tensor:
        out = attend(self, params, *rest)  # type: ignore[arg-type]
        layers.append(params.layer)
        if params.layer == last:
            stop = self.stop
            self.stop = lambda: True
            assert not stop()
        return out

    monkeypatch.setattr(TreeMask, "attend", watched)
    return layers


def test_a_pass_that_is_useless_before_it_begins(tiny: Callable[..., Path]) -> None:
    (stage,) = cut(open_checkpoint(tiny("llama")), 1)
    stage.run(Admit(SESSION, 64, Sampling()))
    job, other = passed(0, (1, 2, 3)), passed(0, (1, 2, 3))
    stage.abandon(job)
    assert stage.run(job) == ()
    assert len(stage.run(other) or ()) == 3  # type: ignore[arg-type]


def test_a_tree_stops_growing(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has grown is given, the context has moved on, and the next tree is the right one."""
    path = tiny("llama")
    draft, other = (load_draft(open_checkpoint(path)) for _ in range(2))

    def ask(base: int, committed: tuple[int, ...]) -> Expand:
        return Expand(SessionId(1), Version(0), base, committed, 5, 4, 1000)

    job = ask(0, (1, 2, 3))
    levels = 0
    add_child = Trie.add_child

    def watched(self: Trie, wanted: object) -> object:
        nonlocal levels
        levels += 1
        if levels == 2:
            draft.abandon(job)
        return add_child(self, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(Trie, "add_child", watched)
    short = draft.run(job)
    monkeypatch.undo()
    whole = other.run(job)
    assert short is not None
    assert whole is not None
    assert short.base == whole.base == 3
    assert levels == 2
    depths = [0] * len(short.parents)
    for i, parent in enumerate(short.parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    assert max(depths) == 3
    assert draft.run(ask(3, (4,))) == other.run(ask(3, (4,)))
