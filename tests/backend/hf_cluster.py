"""Stages of a Hugging Face checkpoint, for clusters in the simulator."""

from __future__ import annotations

from asyncspec.backend.base import Quantize
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.model.stage import HFStage, load_stage
from backend.stage_cluster import LoadedTarget


class Loaded(LoadedTarget[HFStage]):
    """Of a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str = "auto", quantize: Quantize = "none"
    ) -> None:
        super().__init__(checkpoint.info)
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.quantize = quantize
        # What the first stage that is read finds, all go by.
        self._settings: KernelSettings | None = None

    def load(self, first: int, end: int) -> HFStage:
        stage = load_stage(
            self.checkpoint,
            first,
            end,
            settings=self._settings,
            dtype=self.dtype,
            quantize=self.quantize,
        )
        self._settings = stage.settings
        return stage
