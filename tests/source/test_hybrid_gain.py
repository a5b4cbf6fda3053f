"""Two sources in one tree are not worse than the better of them, on a text that misleads lookups.

The text is a passage and its summary, recorded with ``bench record-language``: the draft model is
right far more often than lookups are, which match often and are mostly wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncspec.core.machine import Request, Submitted
from asyncspec.core.sampling import Sampling
from asyncspec.policy.registry import POLICIES
from asyncspec.sim.costs import PRESETS, CostModel
from asyncspec.sim.world import Actor, World
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.ngram import NGramSource
from asyncspec_nodes.plugins.simulation.cluster import connect
from asyncspec_nodes.plugins.simulation.devices import LanguageSource, PathStage
from asyncspec_nodes.plugins.simulation.recorded import Recorded, read_language
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.verify.config import VerifyConfig
from asyncspec_nodes.roles.verify.machine import VerifyMachine
from asyncspec_protocol.ids import DRAFT, Rank

STAGES = 4
ROUND = STAGES + 1
"""Turns that one miss more costs: on a text as short as this that is chance."""
LANGUAGE = read_language(Path(__file__).parent / "data" / "passage.language.jsonl")

Source = Callable[[Any], Any]


def turns(language: Recorded, policy: str, source: Source) -> float:
    """Pipeline turns of the whole text; the text has been checked."""
    draft = DraftMachine(DraftConfig(stages=STAGES, policies=POLICIES, stats_seconds=1e9))
    actors = {DRAFT: Actor(draft, draft.initial(), source)}
    for rank in map(Rank, range(1, STAGES + 1)):
        stage = VerifyMachine(VerifyConfig(rank=rank, stages=STAGES))
        device = PathStage(language, last=rank == STAGES)
        actors[rank] = Actor(stage, stage.initial(), device.run)
    pricing = CostModel(PRESETS["turns"])
    world = World(actors, pricing, wires=pricing)
    connect(world, STAGES)
    text = language.texts[0]
    request = Request(0, text.prompt, len(text.tokens), Sampling(), frozenset(), policy)
    world.feed(DRAFT, Submitted(request))
    world.run(most_steps=1_000_000)
    assert world.tokens[0] == list(text.tokens)
    return world.finished[0].stats["turns"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "policy", ["flowspec", "specpipe", "pipedec", "chunked", "chain", "static-tree"]
)
def test_a_mix_is_not_worse_than_its_better_part(policy: str) -> None:
    drafted = turns(LANGUAGE, policy, LanguageSource(LANGUAGE).run)
    copied = turns(LANGUAGE, policy, NGramSource().run)
    mixed = turns(LANGUAGE, policy, HybridSource([LanguageSource(LANGUAGE)], [NGramSource()]).run)
    assert mixed <= 1.02 * min(drafted, copied) + ROUND
