"""The reader of an answer in the simulator: where its text ends, and how late that is known."""

from __future__ import annotations

from asyncspec.core.machine import Effect, Emit, Input, Request, Stopped
from asyncspec_protocol.ids import DRAFT, Rank
from cluster import Cluster
from laws import check_node


class Reader:
    """Reads one request's text: it ends with the ``kept``-th token, and the machine is told so
    ``delay`` after that token was emitted."""

    def __init__(self, cluster: Cluster, request: Request, kept: int, delay: int = 0) -> None:
        self.cluster = cluster
        self.stop = Stopped(request.request, kept)
        self.delay = delay
        self.got = 0
        # Tokens that had been emitted when the machine was told, if it was before the end.
        self.reported: int | None = None
        # Of each token: whether it was a node of the tree; None for the first of a session.
        self.hits: list[bool | None] = []
        self._sessions: set[int] = set()
        self._asked = False
        cluster.world.watch = self.watch

    def watch(self, rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        check_node(self.cluster, rank)
        for effect in effects:
            if isinstance(effect, Emit) and effect.request == self.stop.request:
                assert self.reported is None, "tokens after the end"
                self.got += len(effect.tokens)
                if effect.session not in self._sessions:
                    self._sessions.add(effect.session)
                    self.hits.append(None)
                else:
                    self.hits += [i < effect.hits for i in range(len(effect.tokens))]
        if self.got >= self.stop.length and not self._asked:
            self._asked = True
            self.cluster.world.at(self.cluster.world.now + self.delay, self.tell)

    def tell(self) -> None:
        if self.stop.request not in self.cluster.world.finished:
            self.reported = self.got
        self.cluster.world.feed(DRAFT, self.stop)
