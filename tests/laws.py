"""What must hold whatever the delays, and how to draw whatever there is to draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import Job
from asyncspec.core.liveness import Liveness
from asyncspec.core.machine import Compute, Effect, Emit, Input, Received, Request, Send
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.toy.model import ToyModel
from asyncspec.policy.autoregressive import Autoregressive
from asyncspec.policy.base import Policy
from asyncspec.policy.chain import Chain
from asyncspec.policy.chunked import Chunked
from asyncspec.policy.flow.policy import Flow
from asyncspec.policy.flowspec import FlowSpec
from asyncspec.policy.level_tree import LevelTree
from asyncspec.policy.linear import Linear
from asyncspec.policy.static_tree import StaticTree
from asyncspec_nodes.roles.draft.scheduler import schedule
from asyncspec_protocol.ids import DRAFT, Rank, first_session, is_draft, owner
from asyncspec_protocol.messages import (
    FINAL,
    Credit,
    Expand,
    Message,
    Open,
    PassTimes,
    PruneIndices,
    Restore,
    Segment,
)
from asyncspec_protocol.sampling import Constraint
from cluster import Cluster, ask
from languages import EOS, LANGUAGES

# Trees small enough that a thousand of them are soon grown, with the same rules as the real ones.
SMALL: dict[str, Policy] = {
    "autoregressive": Autoregressive(),
    "chain": Chain(k=2),
    "chain-streamed": Chain(k=1),
    "static-tree": StaticTree(branching=(2, 1, 2)),
    "chunked": Chunked(size=7, depth=3, width=3, segment=3),
    "pruned": Chunked(early=True, size=7, depth=3, width=3, segment=2, coalesce=True),
    "pipedec": LevelTree(width=3, children=2),
    "specpipe": LevelTree(width=4, children=3, levels=2, parts=2, depth=5, coalesce=True),
    "flowspec-no-sbd": FlowSpec(
        sbd=False,
        l_init=7,
        l_seg=2,
        k=3,
        d_init=3,
        l_exp=6,
        d_exp=3,
        l_deep=3,
        d_most=6,
        coalesce=False,
    ),
    "flowspec": FlowSpec(l_init=7, l_seg=2, k=3, d_init=3, l_exp=6, d_exp=3, l_deep=3, d_most=6),
    "flow": Flow(children=3, nodes=16),
    "dip-sd": Linear(length=3),
    "dip-sd-ahead": Linear(length=2, ahead=True),
    "dip-sd-tree": Linear(length=2, width=2),
}


class Shaken(Struct):
    """Costs that Hypothesis draws: a list of delays, used round and round."""

    delays: list[int]
    used: int = 0

    def next(self) -> float:
        self.used += 1
        return float(self.delays[self.used % len(self.delays)])

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        return self.next()

    def device(self, rank: Rank, job: Job) -> float:
        return self.next()


# Of a toy model of four layers: what sources without and with an EAGLE head read.
FEATURES = [(), (), (FINAL,), (2,), (0, 2, 4), (1, 2, 3)]

penalties = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.7, 1.3, 3.0]),
        "presence_penalty": st.sampled_from([-0.5, 0.6, 2.0]),
        "frequency_penalty": st.sampled_from([-0.3, 0.4, 1.5]),
    },
)
settings_of_draws = st.one_of(
    st.just(Sampling()),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.2, 0.5, 1.0]),
        top_k=st.sampled_from([0, 0, 3]),
        top_p=st.sampled_from([1.0, 1.0, 0.8]),
        min_p=st.sampled_from([0.0, 0.0, 0.2]),
        seed=st.integers(0, 2**64 - 1),
    ),
)
constraints = st.builds(
    Constraint,
    grammar=st.sampled_from(["", *(language.grammar for language in LANGUAGES)]),
    logit_bias=st.sampled_from([(), ((2, 3.5), (5, -100.0))]),
    min_tokens=st.sampled_from([0, 0, 5]),
    stop_tokens=st.just((3, EOS)),
)
samplings = st.one_of(
    settings_of_draws,
    st.builds(lambda how, extra: replace(how, **extra), settings_of_draws, penalties),
    st.builds(
        lambda how, extra, constraint: replace(how, **extra, constraint=constraint),
        settings_of_draws,
        st.one_of(st.just({}), penalties),
        constraints,
    ),
)


def requests(count: int) -> st.SearchStrategy[list[Request]]:
    """Up to ``count`` requests, numbered."""
    one = st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, 7), min_size=1, max_size=9).map(tuple),
            "max_new_tokens": st.integers(1, 14),
            "sampling": samplings,
            "stop_tokens": st.sampled_from([frozenset(), frozenset({3}), frozenset({0, 5})]),
            "policy": st.sampled_from(sorted(SMALL)),
            "tenant": st.sampled_from(("", "", "one", "other")),
        }
    )
    return st.lists(one, min_size=1, max_size=count).map(
        lambda items: [_ended(ask(i, **item)) for i, item in enumerate(items)]
    )


def _ended(request: Request) -> Request:
    """A grammar's answer ends with its end-of-text token."""
    grammar = request.sampling.constraint.grammar
    return replace(request, stop_tokens=frozenset({EOS})) if grammar else request


@st.composite
def clusters(draw: st.DrawFn, **fixed: Any) -> Cluster:
    """A toy cluster with any shape and any delays, which ``costs`` are made of."""
    costs: type[Shaken] = fixed.pop("costs", Shaken)
    delays = draw(st.lists(st.integers(0, 9), min_size=1, max_size=40))
    options: dict[str, Any] = {
        "stages": draw(st.integers(1, 4)),
        "model": ToyModel(vocab=8, seed=draw(st.integers(0, 50))),
        "top": draw(st.sampled_from([0.0, 0.4, 0.7, 0.97])),
        "policies": SMALL,
        "window": draw(st.integers(1, 3)),
        "prefill_rows": draw(st.integers(1, 5)),
        "max_sessions": draw(st.integers(1, 5)),
        "min_common_prefix": draw(st.sampled_from((1, 3, 1000))),
        # 0: no bound; or room for one session, or for two.
        "slots": draw(st.sampled_from((0, 128, 250))),
        "source_slots": draw(st.sampled_from((0, 0, 128, 250))),
        "batch_rows": draw(st.sampled_from((1, 4, 9, 64))),
        "features": draw(st.sampled_from(FEATURES)),
        "apart": draw(st.booleans()),
    }
    return Cluster(costs(delays), **{**options, **fixed})


def watch_invariants(cluster: Cluster) -> None:
    """Check every machine's own rules after each of its steps."""
    tenants: dict[int, str] = {}

    def check(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        check_node(cluster, rank)
        if is_draft(rank) and cluster.state(rank) is not None:
            check_tenants(cluster.state(rank), effects, tenants)
            check_emitted(effects)
            check_scheduled(cluster.state(rank), event, cluster.world.now)
        # A byzantine draft node (``byzantine_draft.py``) sends several prunes of one version.
        byzantine = isinstance(event, Received) and cluster.state(event.peer) is None
        if 0 < rank <= cluster.stages and not byzantine:
            check_prune_applied(cluster.state(rank), event)

    cluster.world.watch = check


def check_tenants(state: Any, effects: Sequence[Effect], tenants: dict[int, str]) -> None:
    """No session begins with another tenant's prompt. ``tenants``: of all sessions so far."""
    for effect in effects:
        if isinstance(effect, Send) and isinstance(restored := effect.message, Restore):
            tenants[restored.session] = ""
        if isinstance(effect, Send) and isinstance(opened := effect.message, Open):
            tenants[opened.session] = state.sessions[opened.session].request.tenant
            assert (
                opened.parent_session < 0
                or tenants[opened.parent_session] == tenants[opened.session]
            )


def check_emitted(effects: Sequence[Effect]) -> None:
    """No more tokens are hits than are given."""
    emitted = [effect for effect in effects if isinstance(effect, Emit)]
    assert all(0 <= effect.hits <= len(effect.tokens) for effect in emitted)


def check_scheduled(state: Any, event: Input, now: float) -> None:
    """What a draft node only notes leaves its scheduler nothing to send or compute."""
    if isinstance(event, Received) and isinstance(event.message, Credit | PassTimes):
        for effect in schedule(state, now)[1]:
            assert not isinstance(effect, Compute)
            assert not (isinstance(effect, Send) and isinstance(effect.message, Segment | Expand))


def check_node(cluster: Cluster, rank: Rank) -> None:
    """A machine's invariants. A source has none, a byzantine draft node
    (``byzantine_draft.py``) none either."""
    if cluster.state(rank) is None:
        return
    if is_draft(rank):
        check_draft(cluster.state(rank))
    elif rank <= cluster.stages:
        check_stage(cluster.state(rank))


def check_stage(state: Any) -> None:
    """A stage keeps nothing of the dead, and no queue grows past its bound."""
    for session in state.sessions.values():
        assert all(session.liveness.alive(node) for node in session.slots.speculative_nodes)
        assert session.slots.used == session.slots.committed + len(session.slots.speculative_nodes)
        assert set(session.slots.speculative) == set(session.slots.speculative_nodes)
        assert session.slots.used <= session.max_slots
    for waiting in (*state.queue, *state.outbox):
        assert waiting.ids
        assert all(state.sessions[waiting.session].liveness.alive(n) for n in waiting.ids)
    check_inbound(state)
    check_pass(state, state.outbox)
    used = sum(session.slots.used for session in state.sessions.values())
    used += sum(state.cached_prompts.values())
    assert state.cached_prompts.keys().isdisjoint(state.sessions)
    # Until all that was admitted before another draft node came has ended, there may be more.
    assert not state.config.slots or used <= state.config.slots * max(1, len(state.drafts))
    if state.running is not None:
        check_pass(state, [part.segment for part in state.running.parts])
    assert state.sent <= state.allowed


def together(state: Any, draft: Rank) -> int:
    """Segments of a draft node's sessions in one pass: no more than it has ever opened sessions,
    which it numbers one by one."""
    opened: int = state.watermarks[draft].opened - first_session(draft) + 1
    most: int = state.config.batch_rows
    return max(1, min(most, opened))


def check_inbound(state: Any) -> None:
    """Nobody has sent more than was granted, nor fills more of the queue than is granted at a time;
    segments come from those that are linked, and sessions are theirs."""
    config, rank = state.config, state.config.rank
    assert set(state.inbound) == {peer for peer in state.peers if config.is_upstream(peer)}
    for peer, credit in state.inbound.items():
        assert credit.received <= credit.granted
        assert credit.expected <= credit.granted - credit.received
        drafts = [peer] if rank == 1 else state.watermarks
        places = config.window * sum(together(state, d) for d in drafts if d in state.watermarks)
        queued = sum(config.upstream_of(waiting.session) == peer for waiting in state.queue)
        assert queued <= max(config.window, places) + credit.extra
    held = (*state.sessions, *state.cached_prompts, *state.closing)
    assert {owner(session) for session in held} <= state.peers


def check_pass(state: Any, segments: Sequence[Any]) -> None:
    """A pass has segments of a session in their order, more than one only where it coalesces, and
    only one alone may have too many rows. Nothing else waits for credit at a time."""
    for session in {waiting.session for waiting in segments}:
        own = [waiting.segment for waiting in segments if waiting.session == session]
        assert own == sorted(set(own))
        known = state.sessions.get(session) or state.closing.get(session)
        assert len(own) == 1 or known is None or known.opening.coalesce
    rows = sum(len(waiting.ids) for waiting in segments)
    assert len(segments) <= 1 or rows <= state.config.batch_rows


def check_prune_applied(state: Any, event: Input) -> None:
    """The step that brought a prune has carried it out, by the prune's own words."""
    if not isinstance(event, Received) or not isinstance(event.message, PruneIndices):
        return
    prune = event.message
    session = state.sessions.get(prune.session)
    if session is None:
        return
    named = {*prune.accepted, *prune.keep}
    assert session.liveness.version >= prune.version
    assert all(n in named or n >= prune.horizon for n in session.slots.speculative_nodes)


def newest_prune_wins(prunes: list[PruneIndices], liveness: Liveness) -> None:
    """In whatever order prunes come, and however often, the newest counts."""
    newest = max(prunes, key=lambda p: p.version)
    for prune in prunes:
        liveness = liveness.apply(prune)
    assert liveness.version == newest.version
    assert liveness.horizon == newest.horizon
    assert liveness.keep == frozenset(newest.keep)
    assert liveness.apply(newest) == liveness


def check_draft(state: Any) -> None:
    """The draft node's books are consistent."""
    assert state.sent <= state.allowed
    for session in state.sessions.values():
        tree = session.tree
        assert session.sent.keys() <= set(tree.nodes)
        assert all(segment < session.next_segment for segment in session.sent.values())
        assert session.unsent == tuple(n for n in tree.nodes if n not in session.sent)
        assert set(session.verified) <= session.sent.keys()
        assert all(node < session.next_node for node in tree.nodes)
        assert len(session.given) < session.request.max_new_tokens
        check_features(session)
        for data in tree.nodes.values():
            above = tree.nodes.get(data.parent)
            assert above is None or data.score <= above.score


def check_features(session: Any) -> None:
    """Features are held of verified live nodes and of nothing else; the source has all others."""
    features = session.features
    if features is None:
        return
    assert features.held.keys() == session.verified.keys()
    assert features.fed == features.recorded
    assert not features.unfed
    if session.decoding:
        assert features.recorded == session.length - 1
        assert session.source_limit == session.length


def lose_links(cluster: Cluster, losses: Sequence[tuple[int, int]]) -> None:
    """At each of these times the draft node loses its link to a stage; soon after it is back."""
    for when, which in losses:
        stage = Rank(1 + which % cluster.stages)
        cluster.world.at(when, partial(cluster.world.cut, DRAFT, stage))
        cluster.world.at(when + 7, cluster.connect_all)


def check_after(cluster: Cluster, asked: list[Request]) -> None:
    """Everybody has got exactly what the target alone would have written, and nothing is kept."""
    for request in asked:
        check_answer(cluster, request)
    check_empty(cluster)


def check_answer(cluster: Cluster, request: Request) -> None:
    """A request got what the target alone would have written, all of it."""
    expected = cluster.expected(request)
    assert tuple(cluster.world.tokens.get(request.request, ())) == expected
    finish = cluster.world.finished[request.request]
    stopped = bool(expected) and expected[-1] in request.stop_tokens
    assert finish.reason == ("stop" if stopped else "length")
    assert finish.stats["new_tokens"] == len(expected)
    assert 0 <= finish.stats["wasted_rows"] <= finish.stats["rows"]
    # With tokens given the last one to be read is none of the prompt.
    assert finish.stats["shared_tokens"] < len(request.prompt) + bool(request.given)


def check_empty(cluster: Cluster) -> None:
    """No session, segment or slot is left anywhere."""
    for rank in cluster.drafts:
        draft = cluster.state(rank)
        assert not draft.sessions
        assert not draft.finishing
        assert not draft.pending_releases
        assert not draft.backlog
    there = {*cluster.drafts, cluster.config.source}
    for constrained in (one for rank, one in cluster.sources.items() if rank in there):
        assert not constrained._sessions
        assert not constrained._source._sessions  # type: ignore[attr-defined]
        assert not getattr(constrained._source, "fed", ())
    if cluster.config.source is not None:
        source = cluster.state(cluster.config.source)
        assert not source.sessions
        assert not source.waiting
        assert not source.working
    for rank, backend in cluster.backends.items():
        backend.check()
        state = cluster.state(rank)
        assert not state.sessions
        assert not state.closing
        assert not state.queue
        assert not state.outbox
        assert state.running is None
        assert not any(known.closed_early for known in state.watermarks.values())
        # But for the prompts that are kept for others, on all stages the same.
        kept = [one for rank in cluster.drafts for one in cluster.state(rank).cached_prompts]
        assert not any(one.unused for one in kept)
        assert state.cached_prompts == {one.session: len(one.prefix) - 1 for one in kept}
        assert set(backend._sessions) == set(state.cached_prompts)
