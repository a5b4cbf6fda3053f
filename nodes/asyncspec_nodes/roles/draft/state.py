"""What the draft node knows, and how it is set up."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.jobs import TensorRows
from asyncspec.core.machine import Effect, Request
from asyncspec.dipsd.measured import Measured
from asyncspec.policy.base import Policy
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.roles.draft.session import DraftSession
from asyncspec_nodes.roles.draft.stats import Counters
from asyncspec_protocol.ids import Rank, SessionId

Effects = tuple[Effect, ...]
FIRST = Rank(1)
REJOIN = "rejoin"


class DraftConfig(Struct, frozen=True):
    """How the draft node works."""

    stages: int
    # The node that has the token source; None: it is here.
    source: Rank | None = None
    # Whether the stages work for no other draft node.
    sole: bool = True
    # Tokens are below this.
    vocab: int = 2**31
    policies: Mapping[str, Policy] = field(default_factory=lambda: POLICIES)
    # Prompts of ended sessions that the stages keep, and the tokens from which on that is worth it.
    kept: int = 8
    share_from: int = 64
    # Prompt nodes per segment.
    prefill_rows: int = 64
    # Slots that the token source of this node has memory for, in the caches of all sessions; 0: no
    # bound.
    slots: int = 0
    # Requests that are processed at a time, where there is room for them; others wait their turn.
    max_sessions: int = 16
    # How long requests wait for a pipeline that is down before they fail.
    rejoin_seconds: float = 30.0
    # Breaks of the pipeline in a row that a request may see without a token between them, before it
    # is taken for their reason.
    most_breaks: int = 3
    # How long the end of a request waits for the stages' accounts.
    account_seconds: float = 2.0
    # What the token source reads of the target beside its tokens, as in ``Open.features``.
    features: tuple[int, ...] = ()
    # Session ids grow also over restarts of this node: the shell starts from the clock.
    first_session: SessionId = SessionId(0)


class Job(Struct, frozen=True):
    """A request that waits for a session, with what it has brought so far."""

    request: Request
    counters: Counters
    given: tuple[int, ...] = ()
    # A session with whose prompt its own begins, and for which it waits as long as that one reads.
    behind: SessionId | None = None


class Ending(Struct, frozen=True):
    """A request whose last tokens are out; the stages' accounts are still to come."""

    session: DraftSession
    reason: str
    ended: float
    missing: frozenset[Rank]


class Kept(Struct, frozen=True):
    """A prompt that the stages hold, by the session that has read it."""

    session: SessionId
    prefix: tuple[int, ...]
    # Only requests of this tenant may begin with it.
    tenant: str
    # Of all of its positions but the last, in order; None where nobody asked for any.
    features: tuple[TensorRows, ...] | None = None
    # Not for those to come: it goes as soon as no session that begins like it is on its way.
    spare: bool = False


class Leaving(Struct, frozen=True):
    """A session that is over, or the prompt that was kept of one: its cache slots count until every
    stage has freed them."""

    session: SessionId
    slots: int
    missing: frozenset[Rank]
    prompt: bool = False


class DraftState(Struct, frozen=True):
    """Everything the draft node knows. Mappings are never changed in place."""

    config: DraftConfig
    next_session: SessionId
    backlog: tuple[Job, ...] = ()
    # In order of service: the first to have credit is the one that has waited longest.
    sessions: Mapping[SessionId, DraftSession] = {}
    endings: Mapping[SessionId, Ending] = {}
    # Prompts of sessions that are over, the oldest first.
    kept: tuple[Kept, ...] = ()
    # What is over and not free everywhere.
    leaving: tuple[Leaving, ...] = ()
    peers: frozenset[Rank] = frozenset()
    # Stages whose link to the next one is up.
    ready: frozenset[Rank] = frozenset()
    # Stages whose next one was lost, and that have said nothing of their link to it since: if they
    # say that it is down they speak of the same break. With the first session after it: who answers
    # its ``Floor`` has nothing to say of that break any more.
    echoes: Mapping[Rank, SessionId] = {}
    # Cache slots there are on the stages that have told, and at a token source of its own; 0: no
    # bound.
    slots: Mapping[Rank, int] = {}
    # Stages that answer a ``Floor``, and so say what is free there.
    telling: frozenset[Rank] = frozenset()
    # What passes take as the stages have reported, and the links' part in a round trip.
    costs: PipelineCosts = PipelineCosts()
    # What this node is, by the sessions whose policy may be planned.
    measured: Measured = Measured()
    # Segments the first stage allows in all on this link, and those sent.
    allowed: int = 0
    sent: int = 0
    # What the first stage allows to wait, the link itself not counted.
    window: int = 0
    # Verdicts of one pass that are still to come: what they allow to send belongs together.
    expected: int = 0
    # After the last input all credit was used up.
    dry: bool = True
    # The token source of this device works on a batch: nobody asks until it is free.
    drafting: bool = False
    # Batches it was asked for so far.
    batches: int = 0

    @property
    def up(self) -> bool:
        """True while every stage is reachable and linked to the next, and the source is there."""
        stages = frozenset(Rank(r) for r in range(1, self.config.stages + 1))
        source = self.config.source
        drafts = source is None or source in self.peers
        return drafts and stages <= self.peers and stages <= self.ready


def put(state: DraftState, session: DraftSession) -> DraftState:
    """The state with a session as it is now; a new one is the last to be served."""
    return replace(state, sessions={**state.sessions, session.session: session})


def without(state: DraftState, session: SessionId) -> DraftState:
    """The state without a session."""
    left = {k: v for k, v in state.sessions.items() if k != session}
    return replace(state, sessions=left)


def starving(state: DraftState) -> bool:
    """Nothing waits at the first stage: it will soon be idle."""
    return state.allowed - state.sent >= state.window


def guessing(state: DraftState, session: DraftSession) -> bool:
    """Whether a session's tree may grow and be sent: its first token is there, or is guessed, which
    is done where nobody else would wait for that."""
    alone = state.config.sole and len(state.sessions) == 1
    return session.answering or (alone and session.policy.speculate_during_prefill)


def reachable(state: DraftState) -> tuple[Rank, ...]:
    """The stages this node is linked to, in order."""
    return tuple(sorted(rank for rank in state.peers if rank <= state.config.stages))
