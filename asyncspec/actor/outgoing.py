"""What a node sends: messages and rows to its links, held until a whole reaction is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from asyncspec.actor.link import Link
from asyncspec.backend import packed
from asyncspec.backend.base import Tensors
from asyncspec.jobs import Rows
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Message


class Outgoing:
    """Sends to the links that are up now; ``tensors`` makes bytes of rows."""

    def __init__(self, links: Mapping[Rank, Link], tensors: Tensors | None) -> None:
        self._links = links
        self._tensors = tensors
        # Links that hold messages; those with a tensor first.
        self._holding: deque[Link] = deque()

    def send(self, to: Rank, message: Message, rows: Rows | None = None) -> int:
        """Give a message to a link, which writes it at ``flush``. Its bytes: none if the link is
        down."""
        link = self._links.get(to)
        if link is None:
            return 0
        tensor = None
        if rows is not None:
            assert self._tensors is not None
            tensor = self._tensors.pack(rows)
            if link.packs:
                tensor = packed.pack(tensor)
        # Rows make another device work, so they go before words about the books.
        (self._holding.append if tensor is None else self._holding.appendleft)(link)
        return link.hold(message, tensor)

    def flush(self) -> None:
        """Let the links write what was sent since the last time."""
        while self._holding:
            self._holding.popleft().flush()
