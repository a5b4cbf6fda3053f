"""Every rule is load-bearing: break it, and the laws notice.

Each mutant replaces one function by a variant with a believable mistake. A test here fails if the
laws of ``test_lossless.py`` still hold with the mistake in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

import asyncspec_nodes.roles.verify.batching as batching
import asyncspec_nodes.roles.verify.session as stage_session
from asyncspec.backend.tree_stage import SlotTokens
from asyncspec.core.accept import Walk, walk
from asyncspec.core.feature_log import FeatureLog
from asyncspec.core.jobs import Compact, TensorRows
from asyncspec.core.kv_slots import SlotTable, allocate, reclaim
from asyncspec.core.liveness import Liveness
from asyncspec.core.sampling import Sampling
from asyncspec.policy.flowspec import FlowSpec
from asyncspec_nodes.roles.draft import verdicts
from asyncspec_nodes.roles.verify import segments
from asyncspec_protocol.errors import ProtocolError
from asyncspec_protocol.ids import NodeId, SessionId, Version
from asyncspec_protocol.messages import PruneIndices, Segment
from cluster import Cluster, ask
from laws import FEATURES, SMALL, Shaken, check_after, newest_prune_wins, watch_invariants

DELAYS = ([1], [3, 1, 0, 2], [0, 5, 1, 1, 7, 2], [2, 9, 0, 0, 1, 4, 3], [4, 0, 0, 6, 1])


PENALISED = Sampling(0.5, presence_penalty=-1.0, frequency_penalty=0.9)


def laws_hold() -> bool:
    """Run a fixed sample of what Hypothesis draws; False where a law is broken."""
    for seed, delays in enumerate(DELAYS * 4):
        features = FEATURES[seed % len(FEATURES)]
        cluster = Cluster(
            Shaken(list(delays)), stages=1 + seed % 4, policies=SMALL, top=0.7, features=features
        )
        watch_invariants(cluster)
        requests = [
            ask(0, prompt=(seed % 8, 1, 2), max_new_tokens=30),
            ask(1, prompt=(4,), max_new_tokens=20, stop_tokens=frozenset({3}), policy="pruned"),
            ask(2, prompt=(5, 5), max_new_tokens=40, sampling=replace(PENALISED, seed=seed)),
        ]
        try:
            newest_prune_wins(OUT_OF_ORDER, Liveness(prompt_length=1))
            for request in requests:
                cluster.submit(request)
            cluster.world.run(until=50_000.0, most_steps=20_000)
            check_after(cluster, requests)
        except (AssertionError, ProtocolError, ValueError, KeyError, IndexError):
            return False
    return True


def test_the_laws_hold_without_a_mutant() -> None:
    assert laws_hold()


def dropped_prune(session: Any, message: Any) -> Any:
    """Every third prune is lost."""
    if message.version % 3 == 0:
        return session, None
    return stage_session.prune(session, message)


def old_version_accepted(self: Liveness, prune: Any) -> Liveness:
    """Whatever comes last counts, also what was overtaken."""
    return APPLY(replace(self, version=-1), prune)


APPLY = Liveness.apply
OUT_OF_ORDER = [
    PruneIndices(SessionId(0), Version(v), NodeId(9 + v), (NodeId(v),), (NodeId(v + 1),))
    for v in (2, 5, 3)
]


def slot_reused_too_early(
    slots: SlotTable, ids: Any, parents: Any, committed: Any
) -> tuple[SlotTable, Any]:
    """The last slot in use is handed out again."""
    grown, rows = allocate(slots, ids, parents, committed)
    if slots.speculative_nodes:
        rows = tuple(replace(row, slot=row.slot - 1) for row in rows)
    return grown, rows


def one_row_unmasked(
    slots: SlotTable, ids: Any, parents: Any, committed: Any
) -> tuple[SlotTable, Any]:
    """The released FlowSpec's bug: a segment of one row sees every slot, siblings included."""
    grown, rows = allocate(slots, ids, parents, committed)
    if len(rows) == 1:
        everything = tuple(range(slots.committed, rows[0].slot + 1))
        rows = (replace(rows[0], visible=everything),)
    return grown, rows


def path_assumed_contiguous(slots: SlotTable, committed: Any, alive: Any) -> Any:
    """The accepted path is taken to be the first so many slots of the tail."""
    settled, stay = reclaim(slots, committed, alive)
    if stay is not None:
        stay = tuple(range(slots.committed, slots.committed + len(stay)))
    return settled, stay


def dead_rows_sent_on(session: Any, ids: Any) -> tuple[int, ...]:
    """Rows that died during their pass travel on."""
    return tuple(range(len(ids)))


def compaction_forgotten(session: Any, message: Any) -> Any:
    """The table is compacted, the cache is not."""
    session, job = stage_session.prune(session, message)
    return session, None if isinstance(job, Compact) else job


def bonus_taken_for_a_hit(tree: Any, verified: Any, choose: Any) -> Walk:
    """On a miss the best child of the last accepted node is taken instead of the bonus."""
    walked = walk(tree, verified, choose)
    tip = walked.accepted[-1] if walked.accepted else tree.root
    children = [n for n, data in tree.nodes.items() if data.parent == tip]
    if walked.bonus is not None and children:
        return Walk((*walked.accepted, children[0]), None)
    return walked


def version_not_moved(session: Any) -> Any:
    """Every prune goes out under the version of the first one."""
    return replace(PRUNE(session), version=Version(1))


PRUNE = verdicts._prune


def unsent_not_kept(session: Any) -> Any:
    """Nodes that are still to be sent are left out of what is kept."""
    message = PRUNE(session)
    return replace(message, keep=tuple(n for n in message.keep if n in session.sent))


def siblings_counted(self: SlotTokens, row: Any) -> dict[int, int]:
    """A row takes every token in the cache for one before it."""
    everything = tuple(range(self._committed, row.slot + 1))
    return OWN(self, replace(row, visible=everything))


OWN = SlotTokens.own


def tokens_not_compacted(self: SlotTokens, start: int, keep: Any) -> None:
    """The cache is compacted, the tokens are not."""


def tokens_lost_on_the_way(*, tokens: Any, **fields: Any) -> Segment:
    """Between stages the tokens of a segment get out of step with its rows."""
    return Segment(tokens=tokens[::-1], **fields)


def dead_features_held(features: Any, passed: Any, tree: Any) -> Any:
    """What the path has left behind is never forgotten."""
    return replace(MOVE(features, passed, tree), held=features.held)


def old_tip_forgotten(features: Any, passed: Any, tree: Any) -> Any:
    """Of a round, the features of the accepted nodes are taken, not that of the tip above them."""
    return MOVE(features, passed[1:], tree)


MOVE = FeatureLog.advance


def features_by_place(features: Any, verdict: Any, handle: Any, alive: Any) -> Any:
    """Features are taken in the order of the nodes that were verified, not of those featured."""
    swapped = replace(verdict, feature_ids=tuple(sorted(verdict.feature_ids, reverse=True)))
    return NOTE(features, verdict if len(verdict.ids) < 2 else swapped, handle, alive)


NOTE = FeatureLog.receive


def asked_ahead_of_features(self: Any) -> int:
    """The source is told of tokens whose features are still to come."""
    return self.recorded + 2 if self.recorded else 0


def first_features_sent(handle: object, rows: Any) -> TensorRows:
    """The features of a pass's first rows are sent, not of those that are alive."""
    return TensorRows(handle, tuple(range(len(rows))))


def plan_not_renewed(state: Any) -> Any:
    """What follows a pass is planned when it begins, and never again."""
    return (state.running,)


def next_pass_replanned(state: Any, now: float) -> Any:
    """The next pass is planned once more when it begins."""
    return START(replace(state, next_pass=None), now)


START = batching._start


MUTANTS: list[tuple[str, Any, str, Callable[..., Any] | property]] = [
    ("a prune is dropped", segments, "prune", dropped_prune),
    ("an old version is accepted", Liveness, "apply", old_version_accepted),
    ("a slot is reused too early", stage_session, "allocate", slot_reused_too_early),
    ("a one-row segment is masked wrongly", stage_session, "allocate", one_row_unmasked),
    ("a path is taken for contiguous", stage_session, "reclaim", path_assumed_contiguous),
    ("dead rows are sent on", segments, "survivors", dead_rows_sent_on),
    ("the cache is not compacted", segments, "prune", compaction_forgotten),
    ("a bonus is taken for a hit", verdicts, "walk", bonus_taken_for_a_hit),
    ("the version is not moved", verdicts, "_prune", version_not_moved),
    ("unsent nodes are not kept", verdicts, "_prune", unsent_not_kept),
    ("siblings' tokens are counted", SlotTokens, "own", siblings_counted),
    ("tokens are not compacted", SlotTokens, "compact", tokens_not_compacted),
    ("tokens get out of step", batching, "Segment", tokens_lost_on_the_way),
    ("features of the dead are held", FeatureLog, "advance", dead_features_held),
    ("the old tip's feature is lost", FeatureLog, "advance", old_tip_forgotten),
    ("features are mixed up", FeatureLog, "receive", features_by_place),
    (
        "the source is asked too early",
        FeatureLog,
        "source_limit",
        property(asked_ahead_of_features),
    ),
    ("features of other rows are sent", segments, "TensorRows", first_features_sent),
    ("an old plan is followed", batching, "_basis", plan_not_renewed),
    ("another plan is followed", batching, "_start", next_pass_replanned),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("target", "name", "broken"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS]
)
def test_the_laws_notice(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, broken: Callable[..., Any] | property
) -> None:
    monkeypatch.setattr(target, name, broken)
    assert not laws_hold()


def test_the_sample_uses_both_expansions() -> None:
    assert isinstance(SMALL["flowspec"], FlowSpec)
    assert SMALL["flowspec"].l_exp
    assert SMALL["flowspec"].l_deep
