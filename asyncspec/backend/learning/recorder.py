"""Makes examples of what a token source is told of its sessions."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from asyncspec.backend.feature_shards import bfloat16_bits
from asyncspec.backend.learning.messages import Bits, Example
from asyncspec.core.jobs import Feed, TensorRows
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand

CONTEXT = 256
"""Rows of a prompt that are kept, its last ones."""

ANSWER = 512
"""Rows of an answer that are kept, its first ones."""

SHORTEST = 8
"""Rows of an answer at least; shorter ones teach nothing."""


class _Session:
    """Tokens and features of one session, as far as they are kept."""

    def __init__(self) -> None:
        # The last tokens of the path, from position ``first_token`` on.
        self.tokens: list[int] = []
        # Features of the positions from ``start`` on.
        self.rows: list[Bits] = []
        self.start = 0
        self.count = 0
        # Unknown until the first tokens are committed.
        self.prompt_length = 0
        self.group = 0
        self.refused = False

    @property
    def end(self) -> int:
        """Positions with features."""
        return self.start + self.count

    @property
    def is_full(self) -> bool:
        """True where no further features are kept."""
        return self.refused or bool(self.prompt_length and self.end >= self.prompt_length + ANSWER)

    def add(self, bits: Bits) -> None:
        """Keep further rows, and forget those too far before the answer."""
        self.rows.append(bits)
        self.count += len(bits)
        answer = min(self.prompt_length or self.end, self.end)
        while self.rows and self.start + len(self.rows[0]) <= answer - CONTEXT:
            oldest = self.rows.pop(0)
            self.start += len(oldest)
            self.count -= len(oldest)

    def refuse(self) -> None:
        """Keep nothing of this session."""
        self.refused = True
        self.tokens, self.rows, self.count = [], [], 0

    def example(self) -> Example | None:
        """None where there is too little to learn from."""
        prompt = self.prompt_length
        first = max(self.start, prompt - CONTEXT)
        end = min(self.end, len(self.tokens) - 1, prompt + ANSWER)
        if self.refused or not prompt or end - prompt < SHORTEST or first >= prompt:
            return None
        rows = np.concatenate(self.rows)[first - self.start : end - self.start]
        return Example(
            tuple(self.tokens[first : end + 1]), prompt - first, self.group, rows.tobytes()
        )


class Recorder:
    """An ``Observer`` that hands on an example of each session that is over.

    Sessions of tenants are left out: what one learns would show in the drafts of another.

    Arguments:
        pack: features of the target as they travel.
        done: takes each example.
    """

    def __init__(
        self, pack: Callable[[TensorRows], WireTensor], done: Callable[[Example], None]
    ) -> None:
        self._pack = pack
        self._done = done
        self._sessions: dict[SessionId, _Session] = {}

    def fed(self, job: Feed) -> None:
        """Keep features of a session."""
        session = self._sessions.setdefault(job.session, _Session())
        for rows in job.rows:
            if session.is_full:
                return
            session.add(bfloat16_bits(self._pack(rows)).copy())

    def committed(self, job: Expand) -> None:
        """Keep tokens of a session, unless it has all that it keeps."""
        session = self._sessions.setdefault(job.session, _Session())
        if job.base == 0:
            session.prompt_length = job.prompt_length
            if job.tenant or not job.prompt_length:
                session.refuse()
        if session.refused:
            return
        length, prompt = len(session.tokens), session.prompt_length
        session.tokens += job.committed[: max(0, prompt + ANSWER + 1 - length)]
        if length < prompt <= len(session.tokens):
            text = np.array(session.tokens[:prompt], np.int64)
            session.group = zlib.crc32(text.tobytes())

    def ended(self, session: SessionId) -> None:
        """Hand on what was kept."""
        kept = self._sessions.pop(session, None)
        if kept is not None and (example := kept.example()) is not None:
            self._done(example)
