"""A DFlash head as a token source.

One pass at the tip gives the distribution of every position of a block, and the tree is the best of
their products (DDTree, arXiv:2604.12989, section 3): further levels cost no pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from asyncspec.backend.base import SharingModel
from asyncspec.backend.draft_model import REMEMBER, SourceSession
from asyncspec.backend.reference import CHUNK
from asyncspec.core.tree import TIP
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, resolve_dtype
from asyncspec.plugins.hf.heads.dflash.head import Context, DFlashHead
from asyncspec.plugins.hf.heads.eagle.checkpoint import EagleCheckpoint
from asyncspec.plugins.hf.heads.eagle.head import Weights
from asyncspec.plugins.hf.heads.eagle.source import FeatureSource, best_products, check_tokens
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.source.expand import NO_PROPOSAL, Coroutine, Proposal
from asyncspec_protocol.messages import Expand, Expanded


@dataclass(slots=True)
class _Session(SourceSession):
    """A session, whose last committed token has no position in the context yet."""

    context: Context
    # Rows of the block behind the tip [levels, H]; None: not computed yet.
    rows: torch.Tensor | None = None
    # By level, of a head that does not look at paths.
    proposals: list[Proposal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Features to be appended to a session's context; without: its block is to be filled in."""

    session: _Session
    features: torch.Tensor | None = None


class DFlashSource(FeatureSource[_Session]):
    """A head with a context per session."""

    def __init__(self, head: DFlashHead, context: int) -> None:
        super().__init__(context)
        self.set_features(head.features, head.dtype)
        self.head = head
        self.token_bytes = head.token_bytes

    def open_session(self) -> _Session:
        return _Session(self.head.new_context())

    def draft(self, job: Expand) -> Coroutine[_Pass, Expanded]:
        return super().draft(best_products(job))

    def advance(self, session: _Session, job: Expand) -> Iterator[_Pass]:
        """See ``ModelSource``. Raises ``ValueError`` where features are missing, or for a token
        that is not in the vocabulary."""
        check_tokens(job.committed, self.head.vocab_size)
        # The tip's own feature is not known yet.
        features = self._fed.take(job.session, len(job.committed[0 if job.base else 1 :]))
        if job.committed:
            session.rows, session.proposals = None, []
            session.tip_token = job.committed[-1]
        for chunk in torch.split(features, CHUNK) if len(features) else ():
            yield _Pass(session, chunk)

    def grower(self, job: Expand) -> _BlockGrower:
        session = self._sessions[job.session]
        return _BlockGrower(self.head, session, self._context - session.length)

    def compute(self, passes: Sequence[_Pass]) -> None:
        with torch.inference_mode():
            self._append([one for one in passes if one.features is not None])
            self._fill([one.session for one in passes if one.features is None])

    def _append(self, passes: Sequence[_Pass]) -> None:
        if not passes:
            return
        starts = [draft_pass.session.context.length for draft_pass in passes]
        parts = [draft_pass.features for draft_pass in passes if draft_pass.features is not None]
        device = self.head.device
        positions = [torch.arange(s, s + len(p)) for s, p in zip(starts, parts, strict=True)]
        where = device.put(torch.cat(positions))
        rows = self.head.context_rows(device.put(torch.cat(parts)), where)
        for draft_pass, context_rows in zip(
            passes, torch.split(rows, [len(part) for part in parts], 3), strict=True
        ):
            draft_pass.session.context.append(context_rows)

    def _fill(self, sessions: Sequence[_Session]) -> None:
        if not sessions:
            return
        tokens = [session.tip_token for session in sessions]
        filled = self.head.fill([session.context for session in sessions], tokens)
        for session, rows in zip(sessions, filled, strict=True):
            # A copy: a view would keep the rows of other sessions in memory.
            session.rows = rows.clone()

    def check(self) -> None:
        """Raise ``AssertionError`` where a session's bookkeeping contradicts itself (tests)."""
        for session in self._sessions.values():
            assert session.context.length == max(0, session.length - 1)


class _BlockGrower:
    """A ``Grower`` over one block."""

    def __init__(self, head: DFlashHead, session: _Session, room: int) -> None:
        """``room``: levels that the target's context has place for."""
        self._head = head
        self._session = session
        # A session's first token has no feature before it.
        self._levels = min(head.block.levels, room) if session.length > 1 else 0
        # By candidate: its level below the tip, and its token.
        self._nodes = {TIP: (0, session.tip_token)}

    def add_child(self, parent: int, token: int) -> None:
        self._nodes[len(self._nodes) - 1] = (self._nodes[parent][0] + 1, token)

    def prepare(self, nodes: Sequence[int]) -> Iterator[_Pass]:
        if self._session.rows is None and self._levels > 0:
            yield _Pass(self._session)

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        proposals_by_node = [NO_PROPOSAL] * len(nodes)
        within = [i for i, node in enumerate(nodes) if self._nodes[node][0] < self._levels]
        if not within or (rows := self._session.rows) is None:
            return proposals_by_node
        places = [self._nodes[nodes[i]] for i in within]
        width = min(width, self._head.draft_vocab_size)
        with torch.inference_mode():
            if self._head.block.markov:
                levels, tokens = zip(*places, strict=True)
                proposals = self._head.proposals(rows[list(levels)], tokens, width)
            else:
                proposals = [self._level(rows, width)[level] for level, _ in places]
        for i, (best, scores) in zip(within, proposals, strict=True):
            proposals_by_node[i] = (best[:width], scores[:width])
        return proposals_by_node

    def _level(self, rows: torch.Tensor, width: int) -> list[Proposal]:
        """At least ``width`` proposals of every level."""
        session = self._session
        if not session.proposals or len(session.proposals[0][0]) < width:
            count = min(max(width, REMEMBER), self._head.draft_vocab_size)
            session.proposals = self._head.proposals(rows, None, count)
        return session.proposals


def load_dflash(
    opened: EagleCheckpoint,
    target: Checkpoint | SharingModel,
    *,
    dtype: str = "auto",
    device: Device = CPU,
) -> DFlashSource:
    """Read an opened head. Raises ``UserError`` or ``CheckpointError``."""
    with torch.inference_mode():
        head = DFlashHead(Weights(opened, target, resolve_dtype(target.info, dtype), device))
    return DFlashSource(head, target.info.context_length)
