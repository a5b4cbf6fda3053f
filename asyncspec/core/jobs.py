"""Jobs of a device.

Law of this file: jobs of one device run one after another in the order in which they were issued.
So a machine may hand out a slot again as soon as it has issued the job that frees it.
"""

from __future__ import annotations

from msgspec import Struct

from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId
from asyncspec_protocol.messages import Expand, Expanded, PromptLogprobs


class TensorRows(Struct, frozen=True):
    """Some rows, ascending, of a tensor that only the device understands."""

    handle: object
    rows: tuple[int, ...]


class Admit(Struct, frozen=True):
    """Make an empty cache for a session that takes ``capacity`` slots at most."""

    session: SessionId
    capacity: int
    sampling: Sampling
    # Length of the user's prompt: penalties treat its tokens and the answer's differently.
    prompt_length: int = 0
    # What the token source reads of the target, as in ``Open.features``.
    features: tuple[int, ...] = ()
    # Likeliest tokens that are given beside the drawn one, as in ``Open.top_logprobs``.
    top_logprobs: int = 0
    # Whether drawn tokens come with their log-probabilities, as in ``Open.log_probs``.
    log_probs: bool = False
    # Slots [0, common_prefix) are copied from ``parent_session``, without penalties only.
    parent_session: SessionId = SessionId(-1)
    common_prefix: int = 0
    # Likeliest tokens beside each scored prompt token, as in ``Open.prompt_logprobs``.
    prompt_logprobs: int = -1
    # Recurrent layers keep the state after so many tokens, for other sessions; 0: of none.
    kept_state: int = 0


class Row(Struct, frozen=True, gc=False):
    """One node in a forward pass. ``visible``: the slots from ``Forward.committed`` on that it
    attends to, ascending: its ancestors and itself. Slots below are visible to every row."""

    slot: int
    position: int
    visible: tuple[int, ...]


class Forward(Struct, frozen=True):
    """One pass over a segment: write keys and values to the rows' slots, attend, go on.

    The first stage needs ``tokens``, later ones ``hidden``; the last one needs both where sampling
    penalises tokens of a row's path. ``sampled_rows``: the rows (indices into ``rows``) whose next
    token the last stage samples, for position ``row.position + 1``; ``scored_tokens``: the prompt
    tokens whose log-probabilities after the first rows it computes. The result is a handle to
    hidden states [n, H], or on the last stage a tuple of one token per sampled row.

    In a session with features a stage adds the depths it computes to what came with each row, low
    to high: a row of a handle is [1 + aux_states, H], and the last result a ``SamplerOutput``.
    """

    session: SessionId
    segment: SegmentId
    # Slots [0, committed) hold the committed path, and there slot == position.
    committed: int
    rows: tuple[Row, ...]
    tokens: tuple[int, ...] = ()
    hidden: TensorRows | None = None
    sampled_rows: tuple[int, ...] = ()
    scored_tokens: tuple[int, ...] = ()

    @property
    def row_count(self) -> int:
        """Rows of the pass."""
        return len(self.rows)

    @property
    def head_rows(self) -> tuple[int, ...]:
        """The rows that the last stage needs logits of, ascending: those that are scored, then
        those that are sampled, as a prompt token before the last is never both."""
        if not self.scored_tokens:
            return self.sampled_rows
        return (*range(len(self.scored_tokens)), *self.sampled_rows)


class Batch(Struct, frozen=True):
    """Several passes as one (SpecPipe 4.4): linear layers see all rows at once, attention each
    session's slots. Passes of one session are as if one came after the other. The result is a tuple
    with that of each pass, the same as of the pass by itself."""

    passes: tuple[Forward, ...]

    @property
    def row_count(self) -> int:
        """Rows of all passes."""
        return sum([len(one.rows) for one in self.passes])


class SamplerOutput(Struct, frozen=True):
    """What the last stage makes of a pass in a session that wants more than tokens."""

    # One per verified row.
    tokens: tuple[int, ...]
    # Handle to the features [n, F] of all rows, where the session has features.
    features: object | None = None
    # The likeliest tokens of each sampled row and their log-probabilities, where they are wanted.
    top_tokens: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...] = ()
    # The log-probability of each token, where it is wanted.
    token_log_probs: tuple[float, ...] = ()
    # Those of ``Forward.scored_tokens``, where there are some.
    prompt_logprobs: PromptLogprobs | None = None


class Compact(Struct, frozen=True):
    """Move slot ``keep[i]``, ascending, to ``start + i``; slots past these are free."""

    session: SessionId
    start: int
    keep: tuple[int, ...]


class Trim(Struct, frozen=True):
    """Keep slots [0, slots) of a session without further passes; return other memory."""

    session: SessionId
    slots: int


class Export(Struct, frozen=True):
    """Read out slots [start, end) of a session, all committed, for the disk. The result is a
    handle, arrays of numpy that do not change any more; an empty tuple where it is not possible."""

    session: SessionId
    start: int
    end: int


class Import(Struct, frozen=True):
    """Make the cache of a session without further passes from what ``Export`` has read out, the
    first slots first. The result is a tuple of the number of its slots, or an empty one."""

    session: SessionId
    slots: int
    # By part: its slots [start, end), and the buffers.
    parts: object


class Release(Struct, frozen=True):
    """Forget a session; its memory is returned. Unknown sessions are no error."""

    session: SessionId


class Feed(Struct, frozen=True):
    """Features of committed positions from ``start`` on, oldest first, for the token source: every
    position once, before an ``Expand`` commits the token after it."""

    session: SessionId
    start: int
    rows: tuple[TensorRows, ...]


class DraftBatch(Struct, frozen=True):
    """Trees for several sessions, one job each at most, with one draft pass a level for all of
    them. The result is a tuple of ``Expanded`` in their order; each may be abandoned by itself."""

    jobs: tuple[Expand, ...]


StageJob = Admit | Forward | Batch | Compact | Trim | Release | Export | Import
SourceJob = Expand | DraftBatch | Release
FeatureJob = SourceJob | Feed
"""Jobs of a token source that reads the target's features beside its tokens."""
Job = StageJob | Expand | DraftBatch | Feed


DraftResult = Expanded | tuple[Expanded, ...]
"""What comes of an ``Expand``, and of a ``DraftBatch``."""


def draft_jobs(job: Job) -> tuple[Expand, ...]:
    """The trees a job is to grow, whether one or many; none where it is of another kind."""
    if isinstance(job, DraftBatch):
        return job.jobs
    return (job,) if isinstance(job, Expand) else ()
