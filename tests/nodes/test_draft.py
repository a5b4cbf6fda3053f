"""The draft machine by example: verdicts, traps, ends."""

from __future__ import annotations

from typing import Any

import pytest

from asyncspec.core.jobs import Feed, Release, TensorRows
from asyncspec.core.machine import (
    Cancelled,
    Compute,
    Computed,
    Emit,
    Finish,
    LinkDown,
    LinkUp,
    Received,
    Send,
    SetTimer,
    Submitted,
    TimerFired,
)
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.roles.draft import machine as draft_machine
from asyncspec_nodes.roles.draft.config import DraftConfig
from asyncspec_nodes.roles.draft.machine import DraftMachine
from asyncspec_nodes.roles.draft.session import DraftSession
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.framing import decode, encode
from asyncspec_protocol.ids import Rank, SessionId, draft_rank, first_session
from asyncspec_protocol.messages import (
    FINAL,
    Close,
    Closed,
    Credit,
    Expand,
    Expanded,
    Finished,
    Open,
    PruneIndices,
    Ready,
    Segment,
    Verdict,
)
from cluster import ask
from nodes.machine_driver import Driven, abandoned, draft, sent

V1 = Rank(1)
# A tree with an inner fork: ids 2.. below root 1 (prompt of one token, first token's node is 1).
TREE: dict[str, Any] = {
    "parents": (-1, -1, 0, 0, 2),
    "tokens": (10, 11, 12, 13, 14),
    "scores": (-0.1, -0.2, -0.3, -0.4, -0.5),
}


def started(**changes: Any) -> Driven:
    """One request; its prompt (a single token) was sent and verified: the first token is 5."""
    driven = draft()
    fields: dict[str, Any] = {"prompt": (1,), "max_new_tokens": 20, "policy": "pruned"}
    effects = driven.feed(Submitted(ask(0, **{**fields, **changes})))
    assert [m.ids for m in sent(effects, Segment)] == [(0,)]
    answer_source(driven, effects)
    driven.effects = driven.feed(verdict(0, {0: 5}))  # type: ignore[attr-defined]
    return driven


def answer_source(driven: Driven, effects: list[Any], **tree: Any) -> list[Any]:
    """Answer what was asked of the token source."""
    (job,) = [e.job for e in effects if isinstance(e, Compute) and isinstance(e.job, Expand)]
    nothing: dict[str, Any] = {"parents": (), "tokens": (), "scores": ()}
    base = job.base + len(job.committed)
    answer = Expanded(job.session, job.version, base, **{**nothing, **tree})
    return driven.feed(Computed(job, answer, 0.1))


def verdict(segment: int, tokens: dict[int, int], applied: int = 0) -> Received:
    message: Any = Verdict(0, segment, applied, tuple(tokens), tuple(tokens.values()))  # type: ignore[arg-type]
    return Received(V1, message)


def prompt_verdict(**output: Any) -> Any:
    """The verdict on a prompt of one token, with optional outputs."""
    return Verdict(0, 0, 0, (0,), (5,), **output)  # type: ignore[arg-type]


def emitted(effects: list[Any]) -> tuple[int, ...]:
    return tuple(t for e in effects if isinstance(e, Emit) for t in e.tokens)


def test_the_prompt_is_a_chain_in_chunks_and_the_source_reads_it_meanwhile() -> None:
    driven = draft()
    prompt = tuple(range(2, 132))
    effects = driven.feed(Submitted(ask(0, prompt=prompt, policy="pruned")))
    (opened,) = sent(effects, Open, to=1)
    assert opened.prompt_length == 130
    chunks = sent(effects, Segment)
    assert [len(c.ids) for c in chunks] == [64, 64, 2]
    assert chunks[1].parents[0] == 63
    assert sum((c.tokens for c in chunks), ()) == prompt
    (job,) = [e.job for e in effects if isinstance(e, Compute)]
    assert isinstance(job, Expand)
    assert (job.committed, job.count) == (prompt, 0)


def test_credit_sends_what_waits_for_it_and_else_is_only_noted(monkeypatch: Any) -> None:
    driven = draft(credit=1)
    prompt = tuple(range(2, 132))
    effects = driven.feed(Submitted(ask(0, prompt=prompt, policy="autoregressive")))
    assert [len(c.ids) for c in sent(effects, Segment)] == [64]
    effects = driven.feed(Received(V1, Credit(9)))
    assert [len(c.ids) for c in sent(effects, Segment)] == [64, 2]
    monkeypatch.setattr(draft_machine, "schedule", None)
    assert driven.feed(Received(V1, Credit(12))) == []
    assert driven.state.allowed == 12


def test_credit_shows_a_policy_that_waits_for_it_that_the_first_stage_is_idle() -> None:
    """It deepens its tree then."""
    driven, _ = guessed(policy="flowspec", max_new_tokens=40)
    answer_source(driven, driven.feed(verdict(1, {64: 10})))
    state = driven.state
    assert state.window > state.allowed - state.sent > 0
    effects = driven.feed(Received(V1, Credit(state.sent + state.window)))
    assert [e for e in effects if isinstance(e, Compute)]


def guessed(credit: int = 99, **changes: Any) -> tuple[Driven, list[Any]]:
    """A prompt of 65 tokens, whose second piece has the last one, and a tree below it, of nodes
    65..69; what was sent."""
    driven = draft(credit=credit)
    effects = driven.feed(Submitted(ask(0, prompt=tuple(range(65)), **changes)))
    return driven, effects + answer_source(driven, effects, **TREE)


def test_a_tree_follows_the_prompt_before_the_first_token_is_there() -> None:
    _, effects = guessed()
    (job,) = [e.job for e in effects if isinstance(e, Compute)][:1]
    assert isinstance(job, Expand)
    assert (len(job.committed), job.count > 0) == (65, True)
    pieces = sent(effects, Segment)
    assert [len(piece.ids) for piece in pieces[:2]] == [64, 1]
    assert sorted(node for piece in pieces[2:] for node in piece.ids) == [65, 66, 67, 68, 69]
    assert {parent for piece in pieces[2:] for parent in piece.parents} == {64, 65, 67}


def test_a_first_token_that_was_guessed_goes_on_with_its_tree() -> None:
    driven, _ = guessed()
    effects = driven.feed(verdict(1, {64: 10}))
    assert emitted(effects) == (10,)
    (message,) = sent(effects, PruneIndices)
    assert (message.accepted, set(message.keep)) == ((65,), {67, 68, 69})
    session = driven.state.sessions[0]
    assert session.tree.root == 65
    counters = session.counters
    assert (counters.rounds, counters.firsts, counters.misses) == (1, (0,), ())


def test_a_first_token_that_was_not_guessed_plants_a_new_root() -> None:
    driven, _ = guessed()
    effects = driven.feed(verdict(1, {64: 99}))
    assert emitted(effects) == (99,)
    assert sent(effects, PruneIndices)[0].keep == ()
    assert [segment.parents for segment in sent(effects, Segment)] in ([], [(64,)])
    counters = driven.state.sessions[0].counters
    assert (counters.firsts, counters.misses) == ((0,), ())
    assert counters.rounds == len(sent(effects, Segment))


def test_a_guess_that_was_not_sent_yet_begins_the_round() -> None:
    driven, effects = guessed(credit=2)
    assert [len(piece.ids) for piece in sent(effects, Segment)] == [64, 1]
    assert emitted(driven.feed(verdict(1, {64: 10}))) == (10,)
    (first, *_) = sent(driven.feed(Received(V1, Credit(99))), Segment)
    assert first.ids[0] == 65
    assert driven.state.sessions[0].counters.rounds == 1


def test_what_is_drafted_before_all_of_the_prompt_is_sent_waits_for_it() -> None:
    driven, effects = guessed(credit=1)
    assert [len(piece.ids) for piece in sent(effects, Segment)] == [64]
    pieces = sent(driven.feed(Received(V1, Credit(99))), Segment)
    assert pieces[0].ids == (64,)
    assert sorted(node for piece in pieces[1:] for node in piece.ids) == [65, 66, 67, 68, 69]


@pytest.mark.parametrize("policy", ["pruned", "chunked", "static-tree", "dip-sd"])
def test_other_policies_draft_from_the_first_token(policy: str) -> None:
    driven = draft()
    effects = driven.feed(Submitted(ask(0, prompt=tuple(range(65)), policy=policy)))
    (job,) = [e.job for e in effects if isinstance(e, Compute)]
    assert isinstance(job, Expand)
    assert (len(job.committed), job.count) == (65, 0)


def test_a_miss_stops_what_the_source_grows_and_a_hit_does_not() -> None:
    """A first token too, where the source was at work on it; one that only reads goes on."""
    for policy, token, count in (("flowspec", 99, 1), ("pruned", 99, 0)):
        driven = draft()
        effects = driven.feed(Submitted(ask(0, prompt=(1,), policy=policy)))
        (job,) = jobs(effects)
        assert abandoned(driven.feed(verdict(0, {0: token}))) == [job] * count
        assert abandoned(driven.feed(Received(V1, Credit(200)))) == []
    driven, _ = guessed()
    (job,) = jobs(driven.feed(verdict(1, {64: 10})))
    assert job.count > 0
    assert abandoned(driven.feed(verdict(2, {65: 12}))) == []
    assert abandoned(driven.feed(verdict(3, {67: 99}))) == [job]


def test_no_lookahead_draft_where_another_session_would_wait_for_it() -> None:
    driven = draft()
    driven.feed(Submitted(ask(0, prompt=(1,), policy="autoregressive")))
    effects = driven.feed(Submitted(ask(1, prompt=(2,))))
    (job,) = [e.job for e in effects if isinstance(e, Compute)]
    assert isinstance(job, Expand)
    assert job.count == 0


def test_segments_that_had_to_wait_for_credit_say_so() -> None:
    driven = draft(credit=2)
    prompt = tuple(range(2 * driven.state.config.prefill_rows + 2))
    chunks = sent(driven.feed(Submitted(ask(0, prompt=prompt))), Segment)
    chunks += sent(driven.feed(Received(V1, Credit(9))), Segment)
    assert [chunk.waited for chunk in chunks] == [False, False, True]


def test_the_first_token_is_a_miss_that_plants_a_new_root() -> None:
    driven = started()
    effects = driven.effects  # type: ignore[attr-defined]
    assert emitted(effects) == (5,)
    assert sent(effects, PruneIndices) == [PruneIndices(0, 1, 2, (1,), ())]  # type: ignore[arg-type]


def test_trap_bonus_token_in_a_later_segment_goes_on_with_the_round() -> None:
    driven = started()
    effects = answer_source(driven, driven.effects, **TREE)  # type: ignore[attr-defined]
    first, second, third = sent(effects, Segment)
    assert first.ids == (1, 2, 3)
    assert second.ids == (4, 5)
    assert third.ids == (6,)
    effects = driven.feed(verdict(first.segment, {1: 10, 2: 13, 3: 99}, applied=1))
    assert emitted(effects) == (10, 13)
    # 2 (token 10) and 5 (token 13), which is still on its way, are accepted: a hit.
    assert sent(effects, PruneIndices) == [PruneIndices(0, 2, 7, (2, 5), ())]  # type: ignore[arg-type]
    assert driven.state.sessions[0].tree.root == 5
    effects = driven.feed(verdict(second.segment, {5: 77}, applied=2))
    assert emitted(effects) == (77,)
    (message,) = sent(effects, PruneIndices)
    assert (message.version, message.accepted, message.keep) == (3, (7,), ())


def test_accepted_nodes_are_repeated_until_every_stage_has_applied_them() -> None:
    driven = started()
    effects = answer_source(driven, driven.effects, **TREE)  # type: ignore[attr-defined]
    effects = driven.feed(verdict(1, {1: 10, 2: 12}, applied=0))
    (message,) = sent(effects, PruneIndices)
    assert message.accepted == (1, 2, 4)
    assert message.keep == (6,)


def test_trap_eos_inside_a_segment_ends_the_answer_there() -> None:
    driven = started(stop_tokens=frozenset({10}))
    answer_source(driven, driven.effects, **TREE)  # type: ignore[attr-defined]
    effects = driven.feed(verdict(1, {1: 10, 2: 13, 3: 99}))
    assert emitted(effects) == (10,)
    assert sent(effects, Close) == [Close(0)]  # type: ignore[arg-type]
    assert Compute(Release(0)) in effects  # type: ignore[arg-type]
    effects = driven.feed(Received(V1, Closed(0, V1, 3, 9, 1, 0.5, 100)))  # type: ignore[arg-type]
    (finish,) = [e for e in effects if isinstance(e, Finish)]
    assert finish.reason == "stop"
    assert finish.stats["new_tokens"] == 2
    assert finish.stats["wasted_rows"] == 9 - 2


def test_the_token_limit_ends_the_answer_and_nothing_is_drafted_past_it() -> None:
    driven = started(max_new_tokens=3)
    answer_source(driven, driven.effects, **TREE)  # type: ignore[attr-defined]
    assert all(n.position <= 2 for n in driven.state.sessions[0].tree.nodes.values())
    effects = driven.feed(verdict(1, {1: 10, 2: 13, 3: 99}))
    assert emitted(effects) == (10, 13)
    assert sent(effects, Close)


def test_statistics_that_never_come_do_not_hold_up_the_end() -> None:
    driven = started(max_new_tokens=2)
    effects = driven.feed(verdict(1, {1: 10}))
    (arm,) = [e for e in effects if isinstance(e, SetTimer)]
    (finish,) = [e for e in driven.feed(TimerFired(arm.timer)) if isinstance(e, Finish)]
    assert finish.reason == "length"


def test_a_lost_stage_ends_the_session_and_a_new_one_goes_on_from_the_committed_path() -> None:
    driven = started()
    effects = driven.feed(LinkDown(V1))
    assert not driven.state.sessions
    assert driven.state.backlog[0].given == (5,)
    again = draft()
    again.state, again.machine = driven.state, driven.machine
    effects = again.feed(LinkUp(V1), Received(V1, Ready(V1, True)), Received(V1, Credit(8)))
    (opened,) = sent(effects, Open)
    assert (opened.session, opened.prompt_length) == (1, 2)
    (chunk,) = sent(effects, Segment)
    assert chunk.tokens == (1, 5)


def test_sessions_go_on_above_those_that_a_stage_has_heard_of() -> None:
    driven = draft()
    driven.feed(Received(V1, Ready(V1, True, 0, SessionId(40))))
    (opened,) = sent(driven.feed(Submitted(ask(0, prompt=(1,)))), Open)
    assert opened.session == 41
    with pytest.raises(RemoteProtocolError, match="not this draft node's"):
        driven.feed(Received(V1, Ready(V1, True, 0, first_session(draft_rank(1)))))


HANDLE = object()


def featured(segment: int, verified: dict[int, int], featured: tuple[int, ...], handle: Any) -> Any:
    ids, tokens = tuple(verified), tuple(verified.values())
    return Received(V1, Verdict(0, segment, 0, ids, tokens, featured), handle)  # type: ignore[arg-type]


def jobs(effects: list[Any]) -> list[Any]:
    return [e.job for e in effects if isinstance(e, Compute)]


def with_features() -> Driven:
    """One request whose prompt of 70 tokens is sent in two chunks, to a source that reads the
    final hidden state."""
    driven = draft(features=(FINAL,))
    effects = driven.feed(Submitted(ask(0, prompt=(1,) * 70, max_new_tokens=20, policy="pruned")))
    assert [m.features for m in sent(effects, Open)] == [(FINAL,)]
    assert jobs(effects) == []
    return driven


def test_the_source_reads_the_prompt_behind_the_stages_and_the_tree_as_it_is_accepted() -> None:
    driven = with_features()
    feed, expand = jobs(driven.feed(featured(0, {}, tuple(range(64)), HANDLE)))
    assert feed == Feed(0, 0, (TensorRows(HANDLE, tuple(range(64))),))  # type: ignore[arg-type]
    assert (expand.base, len(expand.committed), expand.count) == (0, 65, 0)
    # The source is at work: what comes is given to it, it is not asked again.
    (feed,) = jobs(driven.feed(featured(1, {69: 5}, tuple(range(64, 70)), HANDLE)))
    assert feed == Feed(0, 64, (TensorRows(HANDLE, tuple(range(6))),))  # type: ignore[arg-type]
    effects = driven.feed(Computed(expand, Expanded(0, 0, 65, (), (), ())))  # type: ignore[arg-type]
    (expand,) = jobs(effects)
    assert (expand.base, expand.committed) == (65, (1,) * 5 + (5,))
    driven.feed(Computed(expand, Expanded(0, 0, 71, *TREE.values())))  # type: ignore[arg-type]
    # Nodes 70 (the root), 71 (token 10) and 74 (token 13) turn out right, after it the bonus 99;
    # 72 is dead, and so is what came of it.
    effects = driven.feed(featured(2, {70: 10, 71: 13, 72: 1, 74: 99}, (70, 71, 72, 74), HANDLE))
    feed, expand = jobs(effects)
    assert feed == Feed(0, 70, (TensorRows(HANDLE, (0, 1, 3)),))  # type: ignore[arg-type]
    assert (expand.base, expand.committed) == (71, (10, 13, 99))
    session = driven.state.sessions[0]
    assert (session.features.held, session.features.unfed) == ({}, ())


def test_a_source_that_reads_features_guesses_nothing_before_the_first_token() -> None:
    driven = draft(features=(FINAL,))
    assert jobs(driven.feed(Submitted(ask(0, prompt=(1,) * 70)))) == []
    _, expand = jobs(driven.feed(featured(0, {}, tuple(range(64)), HANDLE)))
    assert (len(expand.committed), expand.count) == (65, 0)
    assert jobs(driven.feed(Computed(expand, Expanded(0, 0, 65, (), (), ())))) == []  # type: ignore[arg-type]
    _, expand = jobs(driven.feed(featured(1, {69: 5}, tuple(range(64, 70)), HANDLE)))
    assert (len(expand.committed), expand.count > 0) == (6, True)


def test_a_policy_without_drafts_wants_no_features() -> None:
    driven = draft(features=(2, 4, 5))
    effects = driven.feed(Submitted(ask(0, policy="autoregressive")))
    assert [m.features for m in sent(effects, Open)] == [()]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (featured(0, {}, tuple(range(64)), None), "without its features"),
        (featured(0, {}, (0, 1, 3), HANDLE), "out of order"),
        (featured(0, {}, (1, 2), HANDLE), "out of order"),
        (featured(0, {69: 5}, (), HANDLE), "without its features"),
        (featured(0, {69: 5}, (69,), HANDLE), "out of order"),
        (featured(0, {69: 5}, (0, 1, 69), HANDLE), "out of order"),
        (featured(0, {}, (70,), HANDLE), "never sent"),
    ],
)
def test_features_that_are_not_those_that_must_come(message: Any, text: str) -> None:
    driven = with_features()
    before = driven.state
    with pytest.raises(RemoteProtocolError, match=text):
        driven.feed(message)
    assert driven.state is before


@pytest.mark.parametrize(("nodes", "handle"), [((0,), HANDLE), ((0,), None), ((), HANDLE)])
def test_unwanted_features(nodes: tuple[int, ...], handle: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="which reads none"):
        started().feed(featured(1, {}, nodes, handle))


def test_features_of_a_prompt_that_was_not_sent() -> None:
    driven = draft(credit=1, features=(FINAL,))
    driven.feed(Submitted(ask(0, prompt=(1,) * 70, policy="pruned")))
    with pytest.raises(RemoteProtocolError, match="never sent"):
        driven.feed(featured(0, {}, tuple(range(65)), HANDLE))


def test_cancelling_a_request_that_waits_and_one_that_runs() -> None:
    driven = started()
    driven.feed(*(Submitted(ask(i)) for i in range(1, 6)))
    (finish,) = [e for e in driven.feed(Cancelled(5)) if isinstance(e, Finish)]
    assert (finish.request, finish.reason) == (5, "cancelled")
    assert sent(driven.feed(Cancelled(0)), Close)
    assert driven.feed(Cancelled(99)) == []


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Verdict(3, 0, 0, (0,), (1,)), "never opened"),  # type: ignore[arg-type]
        (Verdict(0, 0, 0, (50,), (1,)), "never sent"),  # type: ignore[arg-type]
        (Open(0, 1, 1, 0, 0.0, 0, 1.0), "unexpected Open"),  # type: ignore[arg-type]
        (prompt_verdict(top_tokens=(5, 6), top_token_log_probs=(-0.5, -1.5)), "likeliest"),
        (prompt_verdict(token_log_probs=(-0.5,)), "log-probabilities"),
        (Verdict(0, 0, 2, (0,), (1,)), "never announced"),  # type: ignore[arg-type]
        (Ready(V1, True, 0, SessionId(2**42 - 2)), "not this draft node's"),
    ],
)
def test_messages_that_a_stage_must_not_send(message: Any, text: str) -> None:
    driven = started()
    before = driven.state
    with pytest.raises(RemoteProtocolError, match=text):
        driven.feed(Received(V1, message))
    assert driven.state is before


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (prompt_verdict(), "likeliest"),
        (prompt_verdict(token_log_probs=(-0.5,)), "likeliest"),
        (prompt_verdict(top_tokens=(5, 6), top_token_log_probs=(-0.5, -1.5)), "log-probabilities"),
    ],
)
def test_what_a_user_asks_for_is_in_every_verdict(message: Any, text: str) -> None:
    driven = draft()
    driven.feed(Submitted(ask(0, prompt=(1,), log_probs=True, top_logprobs=2)))
    with pytest.raises(RemoteProtocolError, match=text):
        driven.feed(Received(V1, message))


def test_a_verdict_with_a_token_that_is_not_in_the_vocabulary() -> None:
    driven = draft(vocab=16)
    driven.feed(Submitted(ask(0, prompt=(1,))))
    with pytest.raises(RemoteProtocolError, match="vocabulary"):
        driven.feed(Received(V1, Verdict(0, 0, 0, (0,), (16,))))  # type: ignore[arg-type]


def test_statistics_that_overflow() -> None:
    """However often a stage tells the largest numbers there are, their sums can travel."""
    driven = started()
    most, seconds = 2**53 - 1, 1e12
    closed = Closed(SessionId(0), V1, most, most, most, seconds, most)
    for _ in range(3000):
        driven.feed(Received(V1, closed))
    (finish,) = [e for e in driven.feed(Cancelled(0), LinkDown(V1)) if isinstance(e, Finish)]
    reported = Finished(finish.request, finish.reason, finish.detail, finish.stats)
    assert decode(encode(reported)).message == reported
    assert finish.stats["rows"] == most


@pytest.mark.parametrize("node", [64, 65])
def test_a_verdict_on_what_still_waits_for_credit(node: int) -> None:
    """Of a prompt and of the tree below it."""
    driven, effects = guessed(credit=1)
    assert [len(piece.ids) for piece in sent(effects, Segment)] == [64]
    with pytest.raises(RemoteProtocolError, match="never sent"):
        driven.feed(verdict(0, {node: 5}))


@pytest.mark.parametrize("changes", [{"prompt": ()}, {"max_new_tokens": -1}, {"policy": "oracle"}])
def test_a_request_no_shell_should_let_through(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        draft().feed(Submitted(ask(0, **changes)))


def bushy(job: Expand) -> Expanded:
    """More than was asked for: thousands of children of the nodes that were named."""
    frontier, start = job.frontier or (-1,), len(job.parents)
    each = 9000 // len(frontier)
    parents = (*job.parents, *(node for node in frontier for _ in range(each)))
    tokens = (*job.tokens, *(token for _ in frontier for token in range(each)))
    scores = (*job.scores, *(-1.0 - i for i in range(len(parents) - start)))
    return Expanded(
        job.session, job.version, job.base + len(job.committed), parents, tokens, scores
    )


@pytest.mark.parametrize(
    "policy",
    [
        "chain:k=9000,ahead=3",
        "static-tree:branching=9000x9000",
        "chunked:size=9000,segment=9000,width=9000",
        "pipedec:width=9000,children=9000,depth=9000",
        "specpipe:width=9000,levels=9000,depth=9000",
        "dip-sd:length=9000,width=9000",
        "flowspec:l_init=9000,l_seg=9000,k=9000,l_exp=9000,l_deep=9000",
    ],
)
def test_every_policy_stays_within_the_limits_of_messages(policy: str) -> None:
    driven = Driven(DraftMachine(DraftConfig(stages=1, policies=POLICIES)))
    effects = driven.feed(LinkUp(V1), Received(V1, Ready(V1, True)), Received(V1, Credit(1000)))
    effects += driven.feed(Submitted(ask(0, prompt=(1,), max_new_tokens=10**6, policy=policy)))
    effects += driven.feed(verdict(0, {0: 5}))
    segments = 0
    for _ in range(8):
        for job in (e.job for e in effects if isinstance(e, Compute)):
            assert isinstance(job, Expand)
            assert decode(encode(job)).message == job
            effects += driven.feed(Computed(job, bushy(job), 0.1))
        for message in (e.message for e in effects if isinstance(e, Send)):
            assert decode(encode(message)).message == message
        segments += len(sent(effects, Segment))
        session = driven.state.sessions[0]
        if session.verified.keys() == session.sent.keys() or not sent(effects, Segment):
            break
        effects = driven.feed(verdict(session.next_segment - 1, hits(session)))
    assert segments > 1


def hits(session: Any) -> dict[int, int]:
    """What a target says that takes every node's first child, and what no node has else."""
    below = {data.parent: data.token for data in reversed(session.tree.nodes.values())}
    return {node: below.get(node, 10**6) for node in session.sent.keys() - session.verified.keys()}


def test_nodes_below_the_levels_of_a_request_are_not_asked_for() -> None:
    driven = started()
    (job,) = [e.job for e in driven.effects if isinstance(e, Compute)]  # type: ignore[attr-defined]
    levels = job.depth + 2  # a lookup's copy goes on below
    tree = {
        "parents": tuple(range(-1, levels - 1)),
        "tokens": tuple(range(10, 10 + levels)),
        "scores": (0.0,) * levels,
    }
    answer_source(driven, driven.effects, **tree)  # type: ignore[attr-defined]
    # The tip is node 1.
    assert session_of(driven).unasked == {1 + job.depth, 2 + job.depth, 3 + job.depth}


def test_nodes_that_a_request_names_are_asked_for() -> None:
    driven = started(policy="chain-streamed")
    first = {"parents": (-1,), "tokens": (10,), "scores": (-0.1,)}
    effects = answer_source(driven, driven.effects, **first)  # type: ignore[attr-defined]
    assert session_of(driven).unasked == {2}
    then = {"parents": (-1, 0), "tokens": (10, 11), "scores": (-0.1, -0.3)}
    answer_source(driven, effects, **then)
    assert session_of(driven).unasked == {3}


def session_of(driven: Driven) -> DraftSession:
    found: DraftSession = driven.state.sessions[0]
    return found
