"""What passes and drafts are measured to take, and what is planned of it (DiP-SD; SpecPipe 4.4)."""

from __future__ import annotations

from msgspec import Struct

from .ids import Rank, SessionId


class PassTimes(Struct, array_like=True, frozen=True, tag="times"):
    """A stage tells the draft node what its passes take, when it has changed: what rows cost
    decides how many are worth sending where many sessions share passes."""

    rank: Rank
    # Rows, ascending, and the mean seconds of passes over about so many.
    rows: tuple[float, ...]
    seconds: tuple[float, ...]
    # What the line from the stage before takes for a row of a segment; 0: not known. Where it is
    # slow, rows that travel make verdicts come later.
    row_seconds: float = 0.0
    # Relative deviation of a pass from what these say: who waits for somebody waits for it.
    jitter: float = 0.0


class Rates(Struct, array_like=True, frozen=True, tag="rates"):
    """A draft node tells the first stage what it has measured of a session whose policy may be
    planned: when its first answer token is out, and when it has changed noticeably."""

    session: SessionId
    # Rounds that were measured; 0: none yet, the session only takes part.
    rounds: int = 0
    # A cautious chance of a drafted token to be accepted (a lower confidence bound).
    alpha: float = 0.0
    # Of a draft: for each token, for each call of the source, and on the links.
    token_seconds: float = 0.0
    call_seconds: float = 0.0
    link_seconds: float = 0.0
    # Relative deviation of a draft's seconds.
    jitter: float = 0.0
    # The mean that the cautious chance is below, and the other end of its interval.
    mean: float = 0.0
    high: float = 0.0
    # Relative deviation of the links' seconds.
    link_jitter: float = 0.0


class Schedule(Struct, array_like=True, frozen=True, tag="schedule"):
    """The first stage tells a draft node what is planned for a session that has told its
    ``Rates``. Another one that comes later counts."""

    session: SessionId
    # Counts the first stage's plans.
    version: int
    # Which batch it is verified in, of how many; of 0: whoever is ready is verified.
    batch: int
    batches: int
    # Tokens of its drafts.
    length: int


class PlanStatusRequest(Struct, array_like=True, frozen=True, tag="consult"):
    """Asks what users are planned for, and how. A client asks a draft node, which asks the first
    stage and passes on what it answers."""

    # Chosen by the asker; the answer bears it.
    question: int


class PlanStatus(Struct, array_like=True, frozen=True, tag="consulted"):
    """The first stage's answer: what it has been told of the users whose sessions may be planned,
    what it does for them, and what that brings. Lists by session, or by stage."""

    question: int
    # Why there is nothing to tell: the draft node names who does not answer.
    missing: str = ""
    # Users of whom enough is known; as in ``Rates``.
    sessions: tuple[SessionId, ...] = ()
    rounds: tuple[int, ...] = ()
    lows: tuple[float, ...] = ()
    means: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()
    token_seconds: tuple[float, ...] = ()
    call_seconds: tuple[float, ...] = ()
    link_seconds: tuple[float, ...] = ()
    jitters: tuple[float, ...] = ()
    link_jitters: tuple[float, ...] = ()
    # A pass of each stage: at all, for each row, and its relative deviation.
    pass_seconds: tuple[float, ...] = ()
    row_seconds: tuple[float, ...] = ()
    pass_jitters: tuple[float, ...] = ()
    # Users of whom too little is known yet, and those suspended for being late.
    unknown: int = 0
    suspended: int = 0
    # What is in use: "plan", or "greedy" batching because it is forecast to be as good, "dropped"
    # because plans brought less, "look" to see what it brings; empty: nothing is decided yet.
    used: str = ""
    # Counts the first stage's decisions; batches by user from 1, 0 where in none; drafts' lengths,
    # 0 where none was told.
    version: int = 0
    batches: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    # Of the plan's cycle, and tokens a second by the forecasts of the last decision.
    period: float = 0.0
    planned: float = 0.0
    greedy: float = 0.0
    # Tokens a second that the users are brought by what is in use, measured over so long.
    throughput: float = 0.0
    measured_seconds: float = 0.0
    # What plans and greedy batching have brought as shares of the latter's forecasts, in rounds
    # of measuring.
    plan_share: float = 0.0
    plan_rounds: float = 0.0
    greedy_share: float = 0.0
    greedy_rounds: float = 0.0
    # Rows of a pass that users share at most.
    batch_rows: int = 0
