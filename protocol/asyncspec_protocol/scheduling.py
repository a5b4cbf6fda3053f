"""Measured costs of passes and drafts, and the schedule made of them (DiP-SD; SpecPipe 4.4)."""

from __future__ import annotations

from operator import lt
from typing import Annotated

from msgspec import Meta

from .base import WireMessage, require
from .ids import Rank, SessionId
from .limits import MAX_COUNT, MAX_NODES, MIN_SECONDS, Count, NonNegative, Seconds, Share


class PassTimes(WireMessage, array_like=True, frozen=True, tag="times"):
    """A stage reports its pass times to the draft node when they have changed: the cost of rows
    decides how many are worth sending where many sessions share passes."""

    rank: Rank
    # Rows, ascending, and the mean seconds of passes over about so many.
    rows: Annotated[
        tuple[Annotated[float, Meta(ge=1, le=MAX_COUNT)], ...], Meta(min_length=1, max_length=32)
    ]
    seconds: tuple[Seconds, ...]
    # Seconds a row of a segment on the link from the stage before; 0: not known. On a slow link,
    # rows that travel delay verdicts.
    row_seconds: Seconds = 0.0
    # Relative deviation of a pass from these times: a plan waits for the slowest.
    jitter: Seconds = 0.0
    # Times as long as alone that its passes take, as other work shares its processors: a policy may
    # ask for less work at a time.
    contention: Annotated[float, Meta(ge=1, le=MAX_COUNT)] = 1.0
    # Most rows of the passes timed at the stage's start, which it has memory for: chunks of prompts
    # may have as many where that pays; 0: not known.
    chunk_rows: Count = 0

    def check(self) -> None:
        require(len(self.rows) == len(self.seconds), "every number of rows has its seconds")
        require(all(map(lt, self.rows, self.rows[1:])), "rows ascend")
        positive = (time for time in (*self.seconds, self.row_seconds) if time)
        require(min(positive, default=1) >= MIN_SECONDS, "a time is 0, or a picosecond at least")


class Rates(WireMessage, array_like=True, frozen=True, tag="rates"):
    """A draft node reports to the first stage its measurements of a session whose policy may be
    planned: when its first answer token is out, and when they have changed noticeably."""

    session: SessionId
    # Measured rounds; 0: none yet, the session only takes part.
    rounds: Count = 0
    # A cautious chance of a drafted token to be accepted (a lower confidence bound).
    alpha: Share = 0.0
    # Seconds of a draft: per token, per call of the source, and on the links.
    token_seconds: Seconds = 0.0
    call_seconds: Seconds = 0.0
    link_seconds: Seconds = 0.0
    # Relative deviation of a draft's seconds.
    jitter: Seconds = 0.0
    # The mean that the cautious chance is below, and the other end of its interval.
    mean: Share = 0.0
    high: Share = 0.0
    # Relative deviation of the links' seconds.
    link_jitter: Seconds = 0.0


class Schedule(WireMessage, array_like=True, frozen=True, tag="schedule"):
    """The first stage's plan for a session with ``Rates``; a later one replaces it."""

    session: SessionId
    # Counts the first stage's plans.
    version: Count
    # Which batch it is verified in, of how many; of 0: drafts are verified as they come.
    batch: Count
    batches: Count
    # Tokens of its drafts.
    length: Annotated[int, Meta(ge=1, le=MAX_NODES)]

    def check(self) -> None:
        require(self.batch < max(1, self.batches), "a batch is one of all")


class PlanStatusRequest(WireMessage, array_like=True, frozen=True, tag="consult"):
    """Requests the plan: a client from a draft node, which requests it from the first stage and
    passes on its answer."""

    # Chosen by the requesting side, repeated in the answer.
    query: Count


class PlanStatus(WireMessage, array_like=True, frozen=True, tag="consulted"):
    """The first stage's answer: the users whose sessions may be planned, their plan, and what it
    brings. Lists by session, or by stage."""

    query: Count
    # Why there is no answer: the draft node names the node that does not answer.
    missing: str = ""
    # Users with enough measurements; as in ``Rates``.
    sessions: tuple[SessionId, ...] = ()
    rounds: tuple[Count, ...] = ()
    lows: tuple[Share, ...] = ()
    means: tuple[Share, ...] = ()
    highs: tuple[Share, ...] = ()
    token_seconds: tuple[NonNegative, ...] = ()
    call_seconds: tuple[NonNegative, ...] = ()
    link_seconds: tuple[NonNegative, ...] = ()
    jitters: tuple[NonNegative, ...] = ()
    link_jitters: tuple[NonNegative, ...] = ()
    # A pass of each stage: at all, for each row, and its relative deviation.
    pass_seconds: tuple[NonNegative, ...] = ()
    row_seconds: tuple[NonNegative, ...] = ()
    pass_jitters: tuple[NonNegative, ...] = ()
    # Users with too few measurements, and those suspended for being late.
    unknown: Count = 0
    suspended: Count = 0
    # In use: "plan", or "greedy" batching because it is forecast to be as good, "dropped" because
    # plans brought less, "look" to measure it; empty: nothing is decided yet.
    used: str = ""
    # Counts the first stage's decisions; batches by user from 1, 0 where in none; drafts' lengths,
    # 0 where none is set.
    version: Count = 0
    batches: tuple[Count, ...] = ()
    lengths: tuple[Annotated[int, Meta(ge=0, le=MAX_NODES)], ...] = ()
    # Seconds of the plan's cycle, and tokens a second by the forecasts of the last decision.
    period: NonNegative = 0.0
    planned: NonNegative = 0.0
    greedy: NonNegative = 0.0
    # Tokens a second with what is in use, measured over so long.
    throughput: NonNegative = 0.0
    measured_seconds: NonNegative = 0.0
    # What plans and greedy batching brought as shares of the latter's forecasts, in rounds of
    # measuring.
    plan_share: NonNegative = 0.0
    plan_rounds: NonNegative = 0.0
    greedy_share: NonNegative = 0.0
    greedy_rounds: NonNegative = 0.0
    # Rows of a pass that users share at most.
    batch_rows: Count = 0

    def check(self) -> None:
        rates = (self.rounds, self.lows, self.means, self.highs, self.token_seconds)
        links = (self.call_seconds, self.link_seconds, self.jitters, self.link_jitters)
        users = {len(self.sessions), *map(len, (*rates, *links, self.batches, self.lengths))}
        stages = {len(self.pass_seconds), len(self.row_seconds), len(self.pass_jitters)}
        require(len(users) == len(stages) == 1, "lists differ in length")


SchedulingMessage = PassTimes | Rates | Schedule | PlanStatusRequest | PlanStatus
