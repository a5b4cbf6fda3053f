"""Token sources of toy targets, without tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np

from asyncspec.backend import sampling
from asyncspec.core.jobs import Feed, TensorRows
from asyncspec.core.rng import uniform
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.toy.model import ToyModel, ToyState, feature, pack, unpack
from asyncspec.source.base import StateSource
from asyncspec.source.expand import Coroutine, Grower, Proposal, StateGrower
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand


@lru_cache(1 << 13)
def _shuffled(key: int, vocab: int) -> tuple[int, ...]:
    """All tokens in an order that ``key`` draws. Trees grow from the same nodes again and again."""
    keys = sampling.uniforms(key, 2, np.arange(vocab))
    return tuple(np.argsort(keys, kind="stable").tolist())


class ToySource(StateSource[ToyState]):
    """A token source of tunable quality: it knows the target and proposes with noise. ``top``:
    share of nodes where the target's choice comes first; elsewhere it is second with the same
    chance, and so on: 0.65 gives the coverage of real draft models by rank."""

    def __init__(self, model: ToyModel, top: float = 0.65, seed: int = 1) -> None:
        super().__init__(lambda _: model.start(), model.extend)
        self._model = model
        self._top = top
        self._seed = seed

    def grower(self, job: Expand) -> Grower:
        _, tip = self._sessions[job.session]
        noise = self._noise(job.session)
        return StateGrower(tip, self.extend, lambda state, w: self._propose(state, w, noise))

    def _noise(self, session: SessionId) -> int:
        """What the proposals depend on beside the tokens."""
        return self._seed

    def _propose(self, state: ToyState, width: int, noise: int) -> Proposal:
        """For one node. The confidence varies, and is calibrated."""
        key = state.hidden ^ noise
        sure = min(0.98, max(0.05, self._top + 0.6 * (uniform(key, 1) - 0.5)))
        truth = self._model.mode(state.hidden)
        # Any rank below ``width`` finds its place; the others are cut off.
        others = [t for t in _shuffled(key, self._model.vocab)[: width + 1] if t != truth]
        rank = int(math.log(uniform(key, 3)) / math.log(1 - sure))
        order = [*others[:rank], truth, *others[rank:]][:width]
        return order, [math.log(sure) + r * math.log(1 - sure) for r in range(len(order))]


class ToyFeatures:
    """Features of any number of depths, for a node that only passes them on."""

    def pack(self, rows: TensorRows) -> WireTensor:
        return pack(rows)

    def unpack(self, tensor: WireTensor) -> object:
        return tuple(map(feature, unpack(tensor)))


class ToyEagle(ToySource, ToyFeatures):
    """Checks the feature of every position, and proposes by the last one."""

    def __init__(
        self, model: ToyModel, features: tuple[int, ...], top: float = 0.65, seed: int = 1
    ) -> None:
        super().__init__(model, top, seed)
        self.features = features
        # By session: of positions 0, 1, ...
        self.fed: dict[SessionId, list[bytes]] = {}

    def release(self, session: SessionId) -> None:
        super().release(session)
        self.fed.pop(session, None)

    def commit(self, job: Expand) -> Coroutine[Any, int]:
        """See ``TokenSource``. Raises ``ValueError`` where features are missing, wrong, held back
        although they are known, or given before they are certain."""
        fed = self.fed.get(job.session, [])
        needed = max(0, job.base + len(job.committed) - 1)
        # A job without nodes may read the beginning of a long text.
        if len(fed) < needed or (job.count and len(fed) > needed):
            raise ValueError(f"{len(fed)} features for {needed} positions")
        start, state = self._sessions.get(job.session) or (0, self._model.start())
        for position, token in enumerate(job.committed, start):
            if position and fed[position - 1] != self._model.feature(state, self.features):
                raise ValueError(f"the feature of position {position - 1} is another one")
            state = self.extend(state, token)
        return (yield from super().commit(job))

    def feed(self, job: Feed) -> None:
        fed = self.fed.setdefault(job.session, [])
        if job.start != len(fed) or not job.rows:
            raise ValueError(f"features from position {job.start} on, {len(fed)} are known")
        for some in job.rows:
            handle = cast("Sequence[bytes]", some.handle)
            fed.extend(handle[row] for row in some.rows)

    def _noise(self, session: SessionId) -> int:
        fed = self.fed.get(session)
        return self._seed ^ int.from_bytes(fed[-1][:8], "little") if fed else self._seed

    def unpack(self, tensor: WireTensor) -> object:
        if tensor.shape[1:] != (len(self.features),):
            raise ValueError(f"features of shape {tensor.shape}, expected {len(self.features)}")
        return super().unpack(tensor)
