"""What a device must be able to do. The jobs themselves are in ``asyncspec.core.jobs``.

Law of this file: jobs run one at a time. A short one may run on another thread than the one before
(``asyncspec.actor.device``), so nothing of a device may hang on the thread.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from asyncspec.core.jobs import Drafted, FeatureJob, Rows, SourceJob, StageJob


class WireTensor(Struct, frozen=True):
    """A tensor as it travels: raw bytes in C order, and what they mean."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Tensors(Protocol):
    """A device's handles to bytes and back. Called from any thread."""

    def pack(self, rows: Rows) -> WireTensor:
        """Rows for the wire. The bytes must stay as they are until they are sent."""

    def unpack(self, tensor: WireTensor) -> object:
        """The handle for received rows. Raises ``ValueError`` for a wrong dtype, width or size;
        the caller makes it the peer's fault."""


class StageBackend(Tensors, Protocol):
    """A block of target layers with its tree cache. Jobs run one at a time."""

    def run(self, job: StageJob) -> object | None:
        """Perform a job. Only ``Forward`` and ``Batch`` have a result."""

    def abandon(self, job: StageJob) -> None:
        """The result of a job that was given out is of no use: end it soon, with whatever result.
        The one method that is called while a job runs, from another thread."""

    def check(self) -> None:
        """Raise ``AssertionError`` where the cache breaks its own rules (tests, idle time)."""


class TokenSource(Protocol):
    """Proposes tokens. Jobs run one at a time."""

    def run(self, job: SourceJob) -> Drafted | None:
        """Grow a tree (``Expand``) or several (``Drafting``: a tuple, in order), or forget a
        session (``Release``)."""

    def abandon(self, job: SourceJob) -> None:
        """Nothing more needs to grow for this job: answer soon with what there is. Of a batch each
        tree is given up for itself, and the others grow on. The one method that is called from
        another thread."""


class FeatureSource(Tensors, Protocol):
    """Proposes tokens by what the target computed for those before. Jobs run one at a
    time."""

    def run(self, job: FeatureJob) -> Drafted | None:
        """As ``TokenSource``, and keep features (``Feed``). Raises ``ValueError`` where features
        are missing."""

    def abandon(self, job: FeatureJob) -> None:
        """See ``TokenSource``."""
