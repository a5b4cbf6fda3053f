"""Work that nobody waits for ends early and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncspec.backend.base import Mode
from asyncspec.backend.draft_trie import Trie
from asyncspec.core.jobs import Admit, Forward, Row
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.draft_model import load_draft
from asyncspec.plugins.hf.model.stage import HFStage
from asyncspec.testing.pipeline import SESSION
from asyncspec_protocol.ids import SegmentId, SessionId, Version
from asyncspec_protocol.messages import Expand
from backend.probe import cut
from backend.products import PRODUCTS, Product, use
from backend.tiny import LAYERS

pytestmark = pytest.mark.torch


def passed(start: int, tokens: Sequence[int]) -> Forward:
    """A pass over nodes in a row after ``start`` committed ones."""
    rows = tuple(
        Row(slot, slot, tuple(range(start, slot + 1))) for slot in range(start, start + len(tokens))
    )
    sampled_rows = tuple(range(len(tokens)))
    return Forward(SESSION, SegmentId(0), start, rows, tuple(tokens), sampled_rows=sampled_rows)


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_pass_ends_between_two_layers(
    product: Product, mode: Mode, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, dtype = use(product, monkeypatch, tiny)
    (stage,) = cut(open_checkpoint(path), 1, dtype, mode=mode)
    stage.run(Admit(SESSION, 64, Sampling()))
    alone = stage.run(passed(0, (1, 2, 3)))
    later = stage.run(passed(3, (4, 5)))
    whole = _answers(stage, passed(3, (4, 5)), monkeypatch)
    useless = passed(3, (6, 7, 8))
    asked = _answers(stage, useless, monkeypatch, after=len(whole) // 2)
    # Nothing is computed after the first yes.
    assert asked == [False] * (len(whole) // 2) + [True]
    assert stage.run(passed(3, (4, 5))) == later
    assert stage.run(passed(0, (1, 2, 3))) == alone


def _answers(
    stage: HFStage, job: Forward, monkeypatch: pytest.MonkeyPatch, after: int | None = None
) -> list[bool]:
    """What a pass is told when it asks whether it is useless, at least once a layer. It becomes so
    while the layer of question ``after`` runs."""
    answers: list[bool] = []
    attention = HFStage._attention

    def watched(self: HFStage, *rest: Any) -> Any:
        tree = attention(self, *rest)
        stop = tree.stop

        def ask() -> bool:
            answers.append(stop())
            if len(answers) == after:
                self.abandon(job)
            return answers[-1]

        tree.stop = ask
        return tree

    with monkeypatch.context() as patch:
        patch.setattr(HFStage, "_attention", watched)
        out = stage.run(job)
    assert out == () if after else out != ()
    assert after or (len(answers) >= LAYERS and not any(answers))
    return answers


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
