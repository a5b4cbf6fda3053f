"""An EAGLE head without tensors: it refuses features that are missing, late, doubled or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from asyncspec.backend.base import WireTensor
from asyncspec.backend.toy.model import ToyModel, ToySource, ToyState, feature, pack, unpack
from asyncspec.core.jobs import DraftResult, FeatureJob, Feed, Release, TensorRows
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand


class ToyEagle(ToySource):
    """Knows what the feature of every position must be, and guesses by the last one."""

    def __init__(
        self, model: ToyModel, features: tuple[int, ...], top: float = 0.65, seed: int = 1
    ) -> None:
        super().__init__(model, top, seed)
        self.features = features
        # By session: of positions 0, 1, ...
        self.fed: dict[SessionId, list[bytes]] = {}

    def run(self, job: FeatureJob) -> DraftResult | None:
        """See ``FeatureSource``."""
        if isinstance(job, Feed):
            self._feed(job)
            return None
        if isinstance(job, Release):
            self.fed.pop(job.session, None)
        return super().run(job)

    def begin(self, job: Expand) -> int:
        """See ``Part``."""
        fed, needed = len(self.fed.get(job.session, ())), job.base + len(job.committed) - 1
        # Both ways: nothing may be held back that is known, or given before it is certain.
        if fed != max(needed, 0):
            raise ValueError(f"{fed} features for {needed} positions")
        return super().begin(job)

    def _feed(self, job: Feed) -> None:
        fed = self.fed.setdefault(job.session, [])
        if job.start != len(fed) or not job.rows:
            raise ValueError(f"features from position {job.start} on, {len(fed)} are known")
        for some in job.rows:
            handle = cast("Sequence[bytes]", some.handle)
            fed.extend(handle[row] for row in some.rows)

    def _read(self, session: SessionId, position: int, state: ToyState, token: int) -> ToyState:
        before = position - 1
        if position and self.fed[session][before] != self._model.feature(state, self.features):
            raise ValueError(f"the feature of position {before} is another one")
        return super()._read(session, position, state, token)

    def _noise(self, session: SessionId) -> int:
        fed = self.fed.get(session)
        return self._seed ^ int.from_bytes(fed[-1][:8], "little") if fed else self._seed

    def pack(self, rows: TensorRows) -> WireTensor:
        """See ``Tensors``."""
        return pack(rows)

    def unpack(self, tensor: WireTensor) -> object:
        """See ``Tensors``."""
        if tensor.shape[1:] != (len(self.features),):
            raise ValueError(f"features of shape {tensor.shape}, expected {len(self.features)}")
        return tuple(map(feature, unpack(tensor)))
