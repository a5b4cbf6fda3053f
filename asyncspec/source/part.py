"""Token sources that others are made of: those that answer at once, and models with passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from asyncspec.jobs import Drafted
from asyncspec.source.grow import Grower, Prepare, nothing
from asyncspec.source.together import Course
from asyncspec_protocol.messages import Expand


class Part(Protocol):
    """A token source that can be asked node by node, for ``LOOK`` successors or more."""

    def begin(self, job: Expand) -> int:
        """Bring the session up to date; the length of its path. Raises ``ValueError`` where
        ``job.base`` is not what the source knows."""

    def grower(self, job: Expand) -> Grower:
        """Grows a tree from the tip on. ``begin`` came before."""

    def run(self, job: Any) -> Drafted | None:
        """See ``TokenSource`` (or ``FeatureSource``)."""

    def abandon(self, job: Any) -> None:
        """See ``TokenSource``."""


@runtime_checkable
class Model(Part, Protocol):
    """A part whose passes several sessions can share: what it would compute for one of them it
    names first, as a value only it understands."""

    def reading(self, job: Expand) -> Course[Any, int]:
        """``begin``, with a pause for every pass."""

    def levels(self, job: Expand) -> tuple[Grower, Prepare[Any]]:
        """``grower``, and the passes it needs before it is asked about some nodes."""

    def compute(self, passes: Sequence[Any]) -> None:
        """One forward pass, for what several sessions have named."""


class _AtOnce:
    """A part as a model that never needs a pass."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.begin, self.grower = part.begin, part.grower
        self.run, self.abandon = part.run, part.abandon

    def reading(self, job: Expand) -> Course[Any, int]:
        """See ``Model``."""
        yield from ()
        return self._part.begin(job)

    def levels(self, job: Expand) -> tuple[Grower, Prepare[Any]]:
        """See ``Model``."""
        return self._part.grower(job), nothing

    def compute(self, passes: Sequence[Any]) -> None:
        """See ``Model``."""
        raise AssertionError("there is nothing to compute")


def model_of(part: Part) -> Model:
    """The part as a model, whichever it is."""
    return part if isinstance(part, Model) else _AtOnce(part)
