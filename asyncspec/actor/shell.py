"""Who stands around a runtime: the process, who delivers its trace, who answers how it is."""

from __future__ import annotations

from typing import Protocol

from asyncspec.actor.link import Link
from asyncspec.actor.machine import Emit, Finish
from asyncspec_protocol.framing import Frame
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import (
    Cancel,
    Collect,
    Consult,
    Consulted,
    Events,
    Inspect,
    Status,
    Submit,
)


class Shell(Protocol):
    """The process around a runtime."""

    def emit(self, effect: Emit) -> None:
        """Certain tokens for a user."""

    def finish(self, effect: Finish) -> None:
        """The end of a request."""

    def client(self, link: Link, message: Submit | Cancel) -> None:
        """A client asks for something."""

    def client_gone(self, link: Link) -> None:
        """A client has closed its link."""

    def changed(self, peer: Rank, up: bool, reason: str) -> None:
        """A link to a node came up, went down, or was refused."""


class Courier(Protocol):
    """Delivers what a node's tap has kept."""

    def joined(self, link: Link) -> None:
        """A link to a node came up."""

    def gone(self, link: Link) -> None:
        """A link to a node or a client is gone."""

    def collect(self, link: Link, message: Collect) -> None:
        """Somebody asks for the trace."""

    def events(self, link: Link, message: Events, frame: Frame) -> None:
        """Part of a stage's trace."""


class Inspector(Protocol):
    """Answers how this node is."""

    def inspect(self, link: Link, message: Inspect) -> None:
        """A client or the draft node asks."""

    def status(self, link: Link, message: Status) -> None:
        """Another node has answered."""

    def consult(self, link: Link, message: Consult) -> None:
        """A client or a draft node asks what is planned."""

    def consulted(self, link: Link, message: Consulted) -> None:
        """The first stage has answered."""

    def gone(self, link: Link) -> None:
        """A link to a node or a client is gone."""
