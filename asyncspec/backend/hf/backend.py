"""The Hugging Face backend: transformers checkpoints on CPUs, by torch. torch is imported inside
the functions that load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncspec.backend.base import (
    EAGLE,
    Backend,
    DType,
    Footprint,
    LoadedSource,
    Mode,
    ModelInfo,
    Quantize,
    SourceSpec,
    StageSpec,
)
from asyncspec.backend.hf.checkpoint_files import list_tensors
from asyncspec.backend.hf.eagle.geometry import check_head
from asyncspec.backend.hf.hub import locate, open_files, short_name
from asyncspec.backend.hf.model_config import inspect_checkpoint, read_generation_config
from asyncspec.backend.hf.tokenizer import HFTokenizer, check_vocab, load_tokenizer, token_ids
from asyncspec.core.errors import AsyncSpecError

if TYPE_CHECKING:
    from asyncspec.backend.hf.checkpoint import Checkpoint
    from asyncspec.backend.hf.stage import HFStage


class HFBackend:
    """See ``Backend``."""

    library = "torch"

    runtime_bytes = 500 << 20
    """Measured: 325 to 385 MiB for torch and transformers, up to 75 MiB of code that oneDNN
    generates in loading (with AMX), the rest for activations of a chunk and the kernels of further
    row counts."""

    def model_name(self, name: str) -> str:
        """See ``Backend``."""
        return short_name(name)

    def locate(self, name: str) -> str:
        """See ``Backend``."""
        return str(locate(name).absolute())

    def inspect(self, name: str) -> ModelInfo:
        """See ``Backend``."""
        return inspect_checkpoint(open_files(name, tokenizer=False).directory)

    def check_target(self, name: str) -> ModelInfo:
        """See ``Backend``."""
        directory = locate(name)
        model_info = inspect_checkpoint(directory)
        list_tensors(directory)
        token_ids(directory)
        return model_info

    def check_source(self, name: str, target: str) -> str:
        """See ``Backend``."""
        target_directory = open_files(target).directory
        if name.startswith(EAGLE):
            head = check_head(name.removeprefix(EAGLE), inspect_checkpoint(target_directory))
            return f"{EAGLE}{head.absolute()}"
        draft = locate(name).absolute()
        inspect_checkpoint(draft)
        list_tensors(draft)
        check_vocab(target_directory, draft)
        return str(draft)

    def sampling_defaults(self, name: str) -> Mapping[str, Any]:
        """See ``Backend``."""
        return read_generation_config(open_files(name, tokenizer=False).directory)

    def footprints(
        self,
        name: str,
        spans: Sequence[tuple[int, int]],
        dtype: DType,
        mode: Mode,
        quantize: Quantize,
    ) -> list[Footprint]:
        """See ``Backend``."""
        from asyncspec.backend.hf.footprint import as_stored, footprint

        files = open_files(name, tokenizer=False)
        stored = as_stored(files, inspect_checkpoint(files.directory))
        return [footprint(files.directory, stored, span, dtype, mode, quantize) for span in spans]

    def source_footprint(self, name: str, target: str, dtype: DType) -> Footprint:
        """See ``Backend``."""
        from asyncspec.backend.hf.eagle.head import head_footprint
        from asyncspec.backend.hf.footprint import as_stored, draft_footprint

        files = open_files(target if name.startswith(EAGLE) else name, tokenizer=False)
        stored = as_stored(files, inspect_checkpoint(files.directory))
        if name.startswith(EAGLE):
            return head_footprint(name.removeprefix(EAGLE), stored, dtype)
        return draft_footprint(files.directory, stored, dtype)

    def preload(self, name: str | None) -> None:
        """See ``Backend``."""
        from asyncspec.backend.hf import draft_model, stage
        from asyncspec.backend.hf.kernels.cpu import ort
        from asyncspec.backend.hf.shard import model_class

        del draft_model, stage
        ort.is_available()
        if name is not None:
            with suppress(AsyncSpecError):
                model_class(inspect_checkpoint(Path(name)).architecture)

    def threads(self) -> int:
        """See ``Backend``."""
        import torch

        return torch.get_num_threads()

    def open(self, name: str, *, tokenizer: bool = True) -> Checkpoint:
        """See ``Backend``."""
        from asyncspec.backend.hf.checkpoint import open_checkpoint

        return open_checkpoint(name, tokenizer=tokenizer)

    def load(self, spec: StageSpec) -> HFStage:
        """See ``Backend``."""
        from asyncspec.backend.hf.stage import load_stage

        return load_stage(
            spec.model, *spec.layers, dtype=spec.dtype, mode=spec.mode, quantize=spec.quantize
        )

    def load_source(self, spec: SourceSpec) -> LoadedSource:
        """See ``Backend``."""
        if spec.name.startswith(EAGLE):
            from asyncspec.backend.hf.eagle.source import load_eagle

            head = load_eagle(spec.name.removeprefix(EAGLE), spec.target, dtype=spec.dtype)
            return LoadedSource(head, head.token_bytes, head.features.wanted, head)
        from asyncspec.backend.hf.draft_model import load_draft

        checkpoint = self.open(spec.name)
        check_vocab(spec.target.path, checkpoint.path)
        vocab = spec.target.info.vocab_size
        draft = load_draft(checkpoint, dtype=spec.dtype, vocab=vocab)
        return LoadedSource(draft, draft.token_bytes)

    def load_tokenizer(self, model: Checkpoint, template: str | None = None) -> HFTokenizer:
        """See ``Backend``."""
        return load_tokenizer(model.path, template)


BACKEND: Backend = HFBackend()
