"""What a trace tells must be what happened: laws over simulated runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import Forward, Job
from asyncspec.core.machine import Emit
from asyncspec.core.sampling import Sampling
from asyncspec.trace.records import Issued, Ran, ReceivedMessage, Record, Reported, Step, Trace
from asyncspec_nodes.plugins.viewer.analysis.build import build
from asyncspec_nodes.plugins.viewer.analysis.critical_path import latency_breakdowns, token_times
from asyncspec_nodes.plugins.viewer.analysis.summary import Utilisation, summarise
from asyncspec_nodes.plugins.viewer.analysis.timeline import RequestTimes, Span, Timeline
from asyncspec_protocol.ids import Rank, draft_rank
from asyncspec_protocol.messages import Expand, Message, Open, PruneIndices
from cluster import Cluster, ask
from effort import examples
from laws import FEATURES, SMALL, Shaken
from trace_events import check_rules, exported

delays = st.lists(st.integers(0, 9), min_size=1, max_size=20)
policies = st.sampled_from(sorted(SMALL))


def run(
    costs: Any, policy: str, stages: int, requests: int = 1, features: tuple[int, ...] = ()
) -> Cluster:
    cluster = Cluster(costs, stages=stages, policies=SMALL, record=True, features=features)
    for number in range(requests):
        # The second one's tokens travel to all stages.
        sampling = Sampling(0.5, presence_penalty=0.5) if number else Sampling()
        prompt = (1, 2, 3 + number)
        cluster.submit(ask(number, policy=policy, prompt=prompt, sampling=sampling))
    cluster.world.run()
    return cluster


@settings(max_examples=examples(100, quick=20))
@given(delays, policies, st.integers(1, 4), st.integers(1, 2), st.sampled_from(FEATURES), st.data())
def test_a_trace_tells_what_happened(
    delays: list[int],
    policy: str,
    stages: int,
    requests: int,
    features: tuple[int, ...],
    data: st.DataObject,
) -> None:
    """All laws of a whole trace, and of what is left of one, on the same run."""
    cluster = run(Shaken(delays), policy, stages, requests, features)
    trace = cluster.trace()
    found = build(trace)
    check_tokens(cluster, policy, found)
    check_counts(cluster, trace, found)
    check_times(found)
    if any(delays):
        check_shares(found)
    check_rules(exported(found))
    check_partial(trace, data)
    check_circular(trace)


def check_tokens(cluster: Cluster, policy: str, found: Timeline) -> None:
    """Tokens of requests are found, verified before they are given."""
    for number, tokens in cluster.world.tokens.items():
        mine = [token for token in found.tokens if token.request == number]
        assert [token.token for token in mine] == tokens
        assert [token.index for token in mine] == list(range(len(tokens)))
        assert all(token.lifetime >= 0 for token in mine)
        for token in mine:
            verified = found.lifetimes[token.lifetime].verified
            assert verified is not None
            assert verified <= token.at
    assert {request.request for request in found.requests} == cluster.world.tokens.keys()
    for request in found.requests:
        end = cluster.world.finished[request.request]
        assert (request.reason, request.policy) == (end.reason, policy)
        assert request.finished is not None


def check_counts(cluster: Cluster, trace: Trace, found: Timeline) -> None:
    """Counts are the machines' own."""
    stats = {number: end.stats for number, end in cluster.world.finished.items()}
    steps = [line for line in trace.lines if isinstance(line, Step)]
    own = [effect for step in steps for effect in step.effects if isinstance(effect, Reported)]
    passes = [span for span in found.spans if span.kind == "compute"]
    assert sum(span.rows for span in passes) == sum(breakdown.rows for breakdown in own)
    assert sum(span.dead for span in passes) == sum(breakdown.dead_rows for breakdown in own)
    # Every stage computes each node of the committed path once, but the last one's token.
    lengths = [one["prompt_tokens"] + one["new_tokens"] for one in stats.values()]
    assert sum(span.useful for span in passes) == cluster.stages * (sum(lengths) - len(lengths))
    assert len(found.rounds) == sum(one["rounds"] for one in stats.values())
    for number, one in stats.items():
        later = [token for token in found.tokens if token.index and token.request == number]
        assert sum(token.hit for token in later) == pytest.approx(one["hit_rate"] * len(later))


def check_times(found: Timeline) -> None:
    """Each token's time is accounted for."""
    times = token_times(found)
    for time in times:
        for later, earlier in zip(time.spans, time.spans[1:], strict=False):
            assert later.at == earlier.until, "no gap, no overlap"
        assert sum(span.seconds for span in time.spans) == pytest.approx(time.until - time.at)
    submissions = {request.request: request.submitted for request in found.requests}
    for breakdown in latency_breakdowns(times, decoding=False):
        end = max(t.at for t in found.tokens if t.request == breakdown.request)
        submitted = submissions[breakdown.request]
        assert breakdown.seconds == pytest.approx(end - submitted)
        assert sum(breakdown.resources.values()) == pytest.approx(breakdown.seconds)
        assert breakdown.resources.get("other", 0.0) <= 0.05 * breakdown.seconds


def check_shares(found: Timeline) -> None:
    """Shares of each device's time sum to one."""
    for share in summarise(found).devices:
        parts = [getattr(share, name) for name in Utilisation.__struct_fields__[3:]]
        assert sum(parts) == pytest.approx(1.0)
        assert min(parts) >= -1e-9


def check_partial(whole: Trace, data: st.DataObject) -> None:
    """A partial trace is read as far as it goes."""
    lines = list(whole.lines)
    count = len(lines)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, count))
        del lines[start : start + data.draw(st.integers(0, count // 2))]
    summarise(build(Trace(whole.header, tuple(lines))))


def check_circular(whole: Trace) -> None:
    """A job that seems to be issued after its end: by a step that it is a cause of. Causes that go
    round in a circle end."""
    found = build(Trace(whole.header, tuple(map(early, whole.lines))))
    for time in token_times(found):
        assert sum(span.seconds for span in time.spans) == pytest.approx(time.until - time.at)
    summarise(found)


def early(line: Record) -> Record:
    """The same with the number of the job before in place of each one that is issued."""
    if not isinstance(line, Step):
        return line
    effects = (replace(e, job=e.job - 1) if isinstance(e, Issued) else e for e in line.effects)
    return replace(line, effects=tuple(effects))


class Delayed(Struct):
    """Everything takes some time; one stage or one link takes long."""

    stage: int = -1
    link_: tuple[int, int] = (-1, -1)

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        return 12.0 if (source, target) == self.link_ else 0.1

    def device(self, rank: Rank, job: Job) -> float:
        if isinstance(job, Forward):
            return 6.0 if rank == self.stage else 1.0
        return 0.5 if isinstance(job, Expand) else 0.0


@pytest.mark.parametrize("policy", ["autoregressive", "chunked", "flowspec"])
@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_a_slow_stage_is_named(stage: int, policy: str) -> None:
    found = build(run(Delayed(stage=stage), policy, 4).trace())
    sentence = summarise(found).bottleneck
    assert sentence.startswith(f"V{stage} is the bottleneck: ")


@pytest.mark.parametrize("policy", ["autoregressive", "chunked", "flowspec"])
@pytest.mark.parametrize("link", [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)])
def test_a_slow_link_is_named(link: tuple[int, int], policy: str) -> None:
    found = build(run(Delayed(link_=link), policy, 4).trace())
    names = [f"V{rank}" if rank else "D0" for rank in link]
    sentence = summarise(found).bottleneck
    assert sentence.startswith(f"The link {names[0]} -> {names[1]} is the bottleneck: ")


def recorded_between(whole: Trace, start: float, end: float) -> Trace:
    """What of a recording would be there had it begun and ended then."""
    lines = [line for line in whole.lines if not isinstance(line, Step | Ran)]
    some = [line for line in whole.lines if isinstance(line, Step | Ran)]
    return Trace(whole.header, (*lines, *(x for x in some if start < x.at <= x.until < end)))


def test_a_request_that_was_there_counts_from_the_first_work_on_it() -> None:
    """The draft node's first step comes when the first stage has had its passes."""
    whole = run(Shaken([6, 2, 2]), "flowspec", 2).trace()
    last = max(line.until for line in whole.lines if isinstance(line, Step | Ran))
    late = 0
    for start in range(0, int(last), 4):
        found = build(recorded_between(whole, start, start + 16))
        passes = [span.at for span in found.spans if span.rank == 1 and span.rows]
        own = [step.at for node in found.log.nodes if not node.info.rank for step in node.steps]
        if found.requests and passes and own and passes[0] < own[0]:
            (request,) = found.requests
            assert request.submitted <= passes[0]
            assert summarise(found).devices[1].busy
            late += 1
    assert late


@given(delays, st.sampled_from(["autoregressive", "chunked", "flowspec"]), st.data())
def test_a_request_that_was_there_already_counts_from_the_start(
    delays: list[int], policy: str, data: st.DataObject
) -> None:
    """Amid a run: neither its request nor its end is in the recording."""
    whole = run(Shaken(delays), policy, 2).trace()
    steps = [line for line in whole.lines if isinstance(line, Step)]
    start, end = sorted(data.draw(st.sampled_from(steps)).at for _ in range(2))
    found = build(recorded_between(whole, start, end))
    asked = {request.request for request in found.requests}
    assert {token.request for token in found.tokens} <= asked
    for device in summarise(found).devices:
        passes = sum(s.until - s.at for s in found.spans if s.rank == device.rank and s.rows)
        assert device.busy > 0 or not (found.tokens and passes)


def passes(found: Timeline) -> dict[tuple[int, int, int], Span]:
    """By stage and segment."""
    spans = [span for span in found.spans if span.kind == "compute"]
    return {(span.rank, span.session, span.segment): span for span in spans}


@pytest.mark.slow
@given(delays, policies, st.integers(1, 3), st.integers(0, 40))
def test_a_recording_that_begins_late_tells_useful_rows_from_others(
    delays: list[int], policy: str, stages: int, start: int
) -> None:
    """But for sessions of which neither the opening nor a prune was recorded."""
    whole = run(Shaken(delays), policy, stages, requests=2).trace()
    late = recorded_between(whole, start, 1e9)
    came = [line.input for line in late.lines if isinstance(line, Step)]
    known = {
        event.message.session
        for event in came
        if isinstance(event, ReceivedMessage) and isinstance(event.message, Open | PruneIndices)
    }
    every = passes(build(whole))
    for name, span in passes(build(late)).items():
        assert span.useful == (every[name].useful if span.session in known else -1)


@pytest.mark.parametrize("policy", sorted(SMALL))
def test_passes_for_a_draft_node_that_was_not_recorded(policy: str) -> None:
    cluster = Cluster(Shaken([1, 2]), stages=2, drafts=2, policies=SMALL, record=True)
    for number in range(2):
        cluster.submit(ask(number, policy=policy), draft_rank(number))
    cluster.world.run()
    trace = cluster.trace()
    every = passes(build(trace))
    steps = [line for line in trace.lines if isinstance(line, Step)]
    own = [effect for step in steps for effect in step.effects if isinstance(effect, Reported)]
    assert sum(span.rows for span in every.values()) == sum(one.rows for one in own)
    assert sum(span.dead for span in every.values()) == sum(one.dead_rows for one in own)
    mine = tuple(line for line in trace.lines if line.rank != draft_rank(1))
    part = passes(build(replace(trace, lines=mine)))
    # What the last verdict of an answer accepts is in no prune.
    emitted = [e for step in steps for e in step.effects if isinstance(e, Emit) and e.request == 1]
    lost = [every[name].useful - span.useful for name, span in part.items()]
    assert min(lost) >= 0
    assert sum(lost) <= 2 * emitted[-1].hits


def test_passes_of_which_nothing_tells_the_use_are_left_out() -> None:
    whole = run(Shaken([1]), "flowspec", 2).trace()
    lines = tuple(
        line
        for line in whole.lines
        if not isinstance(line, Step)
        or not isinstance(line.input, ReceivedMessage)
        or not isinstance(line.input.message, Open | PruneIndices)
    )
    found = build(replace(whole, lines=lines))
    assert {span.useful for span in passes(found).values()} == {-1}
    summary = summarise(found)
    assert all(one.useful == one.wrong == one.dead == 0 for one in summary.devices)
    assert all(one.unknown for one in summary.devices if one.rank)
    assert summary.bottleneck.endswith(
        " Rows of a session count as neither useful nor wasted: "
        "what became of them was not recorded."
    )
    check_rules(exported(found))


def test_known_rows_do_not_stand_for_others() -> None:
    one = Span(1, "compute", 0.0, 1.0, session=1, segment=0, rows=4, useful=1, dead=1)
    other = Span(1, "compute", 1.0, 2.0, session=2, segment=0, rows=4, useful=-1)
    shared = [replace(span, at=2.0, until=4.0) for span in (one, other)]
    recorded = build(run(Shaken([1]), "flowspec", 1).trace())
    requests = (RequestTimes(0, 0.0, 4.0),)
    whole = replace(recorded, requests=requests, tokens=(), spans=(one, other, *shared))
    device = summarise(whole).devices[1]
    parts = (device.useful, device.wrong, device.dead, device.unknown)
    assert parts == pytest.approx((0.125, 0.25, 0.125, 0.5))


@pytest.mark.parametrize("pause", [100, 1000])
def test_no_rows_are_in_flight_between_requests(pause: int) -> None:
    cluster = Cluster(Shaken([1]), stages=2, policies=SMALL, record=True)
    for number in range(2):
        request = ask(number, policy="flowspec")
        cluster.world.at(float(number * pause), cluster.submit, request)
    cluster.world.run()
    found = build(cluster.trace())
    alone = build(run(Shaken([1]), "flowspec", 2).trace())
    assert found.duration > pause
    assert summarise(found).rows_in_flight == pytest.approx(
        summarise(alone).rows_in_flight, rel=0.2
    )


@given(delays, policies, st.integers(0, 40), st.integers(1, 2))
def test_a_stage_that_is_lost_and_comes_back(
    delays: list[int], policy: str, when: int, rank: int
) -> None:
    cluster = Cluster(Shaken(delays), stages=2, policies=SMALL, record=True)
    cluster.submit(ask(policy=policy))

    def restart() -> None:
        cluster.recorders.pop(Rank(rank))
        cluster.world.restart(Rank(rank), cluster.stage(Rank(rank)))
        cluster.world.at(cluster.world.now + 1, cluster.connect_all)

    cluster.world.at(float(when), restart)
    cluster.world.run()
    found = build(cluster.trace())
    assert [token.token for token in found.tokens] == cluster.world.tokens[0]
    summarise(found)


def test_outcomes_of_segments() -> None:
    found = build(run(Shaken([2, 1, 3]), "flowspec", 3).trace())
    outcomes = Counter(lifetime.outcome for lifetime in found.lifetimes)
    assert outcomes["verified"] > 0
    assert outcomes["pruned"] > 0
    assert sum(lifetime.emitted for lifetime in found.lifetimes) == len(found.tokens)
    for lifetime in found.lifetimes:
        moments = [lifetime.sent]
        for hop in lifetime.hops:
            times = (hop.received, hop.started, hop.ended, hop.sent)
            moments += [time for time in times if time is not None]
        assert moments == sorted(moments)


@given(delays, policies, st.integers(1, 3))
def test_a_token_source_on_its_own_node_is_no_stage(
    delays: list[int], policy: str, stages: int
) -> None:
    cluster = Cluster(Shaken([*delays, 1]), stages=stages, policies=SMALL, record=True, apart=True)
    cluster.submit(ask(policy=policy, prompt=(1, 2, 3, 4, 5, 6, 7)))
    cluster.world.run()
    timeline = build(cluster.trace())
    # The first four nodes of the prompt bring no verdict: their lifetime ends at the last stage.
    assert timeline.lifetimes[0].outcome == "prompt"
    found = summarise(timeline)
    assert [share.device for share in found.devices] == [
        "D0", *(f"V{rank}" for rank in range(1, stages + 1)), "source",
    ]  # fmt: skip
    drafts = any(hop.hop == "source -> D0" for hop in found.hops)
    assert drafts == (policy != "autoregressive")
    known = {share.device for share in found.devices} | {hop.hop for hop in found.hops} | {"other"}
    assert all(breakdown.resources.keys() <= known for breakdown in found.requests)
