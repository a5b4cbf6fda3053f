"""The draft model as a token source: EAGLE-2's tree, and nothing computed twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncspec.core.jobs import DraftBatch, Release
from asyncspec.core.tree import Shape
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.draft_model import DraftModel, load_draft
from asyncspec.source.expand import Proposal, beam, path_grower
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded
from backend.row_count import count_rows
from backend.tiny import VOCAB

pytestmark = pytest.mark.torch

ONE = SessionId(1)
PROMPT = tuple(Random(0).randrange(VOCAB) for _ in range(100))


def ask(
    draft: DraftModel,
    base: int,
    committed: Sequence[int],
    depth: int = 4,
    width: int = 4,
    count: int = 12,
    session: SessionId = ONE,
) -> Expanded:
    expanded = draft.run(Expand(session, Version(7), base, tuple(committed), depth, width, count))
    assert isinstance(expanded, Expanded)
    draft.check()
    return expanded


@pytest.fixture
def draft(tiny: Callable[..., Path]) -> DraftModel:
    return load_draft(open_checkpoint(tiny("llama")))


class Plain:
    """The same tree by transformers alone, every path computed from scratch."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def grow(self, text: Sequence[int], depth: int, width: int, count: int) -> list[list[int]]:
        """Paths of tokens, one per node, best first."""

        def successors(path: tuple[int, ...], width: int) -> Proposal:
            with torch.inference_mode():
                logits = self.model(torch.tensor([[*text, *path]])).logits[0, -1]
            best = logits.log_softmax(-1).topk(width)
            return best.indices.tolist(), best.values.tolist()

        parents, tokens, _ = beam(path_grower(successors), Shape(depth, width, count))
        return paths(parents, tokens)


def paths(parents: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for parent, token in zip(parents, tokens, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def test_the_tree_is_that_of_the_plain_model(draft: DraftModel, tiny: Callable[..., Path]) -> None:
    plain = Plain(tiny("llama"))
    random = Random(1)
    text = list(PROMPT)
    ask(draft, 0, text, count=0)
    base = len(text)
    for _ in range(6):
        expanded = ask(draft, base, text[base:])
        assert expanded.base == len(text)
        assert expanded.version == 7
        assert paths(expanded.parents, expanded.tokens) == plain.grow(text, 4, 4, 12)
        assert list(expanded.scores) == sorted(expanded.scores, reverse=True)
        base = len(text)
        known = paths(expanded.parents, expanded.tokens)
        text += random.choice(known)[: random.randint(0, 4)]
        text += [random.randrange(VOCAB) for _ in range(random.randint(0, 2))]


def test_nothing_is_drafted_twice(draft: DraftModel) -> None:
    computed = count_rows(draft)
    first = ask(draft, 0, PROMPT)
    rows = computed()
    again = ask(draft, len(PROMPT), ())
    assert (again.parents, again.tokens) == (first.parents, first.tokens)
    ask(draft, len(PROMPT), (), depth=2, width=3, count=5)
    assert computed() == rows
    # The tip moves to a computed node: its subtree is there, one deeper level is new.
    ask(draft, len(PROMPT), [first.tokens[0]], depth=3)
    assert computed() - rows <= 4 * 2


def test_moving_on_costs_the_new_tokens_only(draft: DraftModel) -> None:
    computed = count_rows(draft)
    ask(draft, 0, PROMPT, count=0)
    assert computed() == len(PROMPT)
    ask(draft, len(PROMPT), [3, 4, 5], count=0)
    assert computed() == len(PROMPT) + 3
    ask(draft, len(PROMPT) + 3, (), count=0)
    assert computed() == len(PROMPT) + 3


def test_a_wider_question_than_before(draft: DraftModel, tiny: Callable[..., Path]) -> None:
    ask(draft, 0, PROMPT)
    expanded = ask(draft, len(PROMPT), (), depth=2, width=50, count=60)
    want = Plain(tiny("llama")).grow(PROMPT, 2, 50, 60)
    assert paths(expanded.parents, expanded.tokens) == want
    everything = ask(draft, len(PROMPT), (), depth=1, width=10_000, count=10_000)
    assert sorted(everything.tokens) == list(range(VOCAB))


def test_only_the_abandoned_job_stops(draft: DraftModel) -> None:
    ask(draft, 0, PROMPT, count=0)
    one, same = (Expand(ONE, Version(7), len(PROMPT), (), 4, 4, 12) for _ in range(2))
    draft.abandon(DraftBatch((one, Expand(SessionId(2), Version(7), 0, (), 4, 4, 12))))
    stopped, grown = draft.run(one), draft.run(same)
    assert isinstance(stopped, Expanded)
    assert isinstance(grown, Expanded)
    assert (len(stopped.tokens), len(grown.tokens)) == (4, 12)


def test_base_must_be_what_the_source_knows(draft: DraftModel) -> None:
    with pytest.raises(ValueError, match="knows 0 tokens, not 5"):
        ask(draft, 5, [1])
    ask(draft, 0, [1, 2, 3])
    with pytest.raises(ValueError, match="knows 3 tokens, not 0"):
        ask(draft, 0, [1])
    draft.run(Release(ONE))
    draft.run(Release(ONE))
    ask(draft, 0, [1])


def test_sessions_are_apart(draft: DraftModel) -> None:
    want = [ask(draft, 0, PROMPT[i:], session=SessionId(i)) for i in range(1, 3)]
    for i in range(1, 3):
        draft.run(Release(SessionId(i)))
    ask(draft, 0, PROMPT[1:50], session=SessionId(1))
    ask(draft, 0, PROMPT[2:70], session=SessionId(2))
    got = [
        ask(draft, 49, PROMPT[50:], session=SessionId(1)),
        ask(draft, 68, PROMPT[70:], session=SessionId(2)),
    ]
    assert [(e.parents, e.tokens) for e in got] == [(e.parents, e.tokens) for e in want]


def test_an_empty_context_proposes_nothing(draft: DraftModel) -> None:
    assert ask(draft, 0, ()).tokens == ()
    assert ask(draft, 0, [1]).tokens


def test_at_the_end_of_its_context_it_stops_proposing(tiny: Callable[..., Path]) -> None:
    draft = load_draft(open_checkpoint(tiny("llama", max_position_embeddings=16)))
    expanded = ask(draft, 0, PROMPT[:14])
    assert max(len(path) for path in paths(expanded.parents, expanded.tokens)) == 2
    assert ask(draft, 14, PROMPT[14:16]).tokens == ()
    assert ask(draft, 16, PROMPT[16:60]).tokens == ()
    assert ask(draft, 60, PROMPT[60:61]).base == 61


def test_a_smaller_target_vocabulary_bounds_proposals(tiny: Callable[..., Path]) -> None:
    draft = load_draft(open_checkpoint(tiny("llama")), vocab=10)
    expanded = ask(draft, 0, [1, VOCAB + 5], width=40, count=40)
    assert expanded.tokens
    assert max(expanded.tokens) < 10


def test_tokens_that_are_not_the_targets_are_not_drafted(tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    free = ask(load_draft(open_checkpoint(path)), 0, PROMPT, depth=1, width=6, count=6)
    foreign = (free.tokens[0], free.tokens[3], VOCAB + 5)
    kept = [token for token in free.tokens if token not in foreign]
    masked = load_draft(open_checkpoint(path), foreign=foreign)
    assert list(ask(masked, 0, PROMPT, depth=1, width=4, count=4).tokens) == kept
