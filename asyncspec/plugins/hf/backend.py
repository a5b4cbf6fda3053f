"""The Hugging Face backend: transformers on CPUs. torch is imported where models are loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncspec.backend.base import (
    CPU,
    Backend,
    DeviceMemory,
    DType,
    FilePart,
    Footprint,
    Learnable,
    LoadedSource,
    ModelInfo,
    OpenModel,
    SourceSpec,
    StageBackend,
    StageOptions,
    StageSpec,
    twin_quantize,
)
from asyncspec.backend.draft_vocabulary import load_fitting
from asyncspec.backend.hub import is_cached
from asyncspec.backend.kept_results import kept_by_user
from asyncspec.backend.registry import DEFAULT, backend_name, backend_of
from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec.core.tensors import Tensors
from asyncspec.plugins.hf.checkpoint.files.headers import list_tensors
from asyncspec.plugins.hf.checkpoint.files.hub import locate, open_files, short_name
from asyncspec.plugins.hf.checkpoint.formats.layouts import quantized_tensors
from asyncspec.plugins.hf.checkpoint.formats.settings import check_requantized
from asyncspec.plugins.hf.checkpoint.model_config import (
    inspect_checkpoint,
    read_config,
    read_generation_config,
    text_config,
)
from asyncspec.plugins.hf.checkpoint.tokenizer import (
    HFTokenizer,
    load_tokenizer,
    token_ids,
)
from asyncspec.plugins.hf.heads.eagle.geometry import check_head
from asyncspec.plugins.hf.heads.mtp.layouts import find_mtp
from asyncspec.source.registry import EAGLE_PREFIX, MTP_NAME, TWIN_NAME, kind_of

NAMES = frozenset(
    ("auto", "cpu", "cuda", "emulated", "emulated-paths", "gpu", "metal", "mps", "rocm", "xpu")
)
"""What a device may be called, without its number."""

BUILDS = ("torch", "transformers", "numpy", "onnxruntime")
"""Packages whose code computes a stage."""


class HFBackend(Backend):
    library = "torch"
    builds = BUILDS

    runtime_bytes = 500 << 20
    """Measured: 325 to 385 MiB for torch and transformers, up to 75 MiB of code that oneDNN
    generates in loading (with AMX), the rest for activations of a chunk and the kernels of further
    row counts."""

    def model_name(self, name: str) -> str:
        return short_name(name)

    def locate(self, name: str) -> str:
        return str(locate(name).absolute())

    def inspect(self, name: str) -> ModelInfo:
        return inspect_checkpoint(open_files(name, tokenizer=False).directory)

    def check_target(self, name: str) -> ModelInfo:
        directory = locate(name)
        model_info = inspect_checkpoint(directory)
        list_tensors(directory)
        token_ids(directory)
        return model_info

    def check_source(self, name: str, target: str) -> str:
        if name.startswith(EAGLE_PREFIX):
            # The target may be another backend's.
            head = check_head(name.removeprefix(EAGLE_PREFIX), backend_of(target).inspect(target))
            return f"{EAGLE_PREFIX}{head.absolute()}"
        if name == MTP_NAME:
            files = open_files(target)
            target_directory = files.directory
            info = inspect_checkpoint(target_directory)
            config = read_config(target_directory)
            tensors = quantized_tensors(text_config(config), files.tensors())
            find_mtp(target_directory, config, tensors, info)
            return MTP_NAME
        if (twin := twin_quantize(name)) is not None:
            return f"{TWIN_NAME}:{twin}"
        draft = locate(name).absolute()
        inspect_checkpoint(draft)
        list_tensors(draft)
        backend_of(target).token_names(target)
        token_ids(draft)
        return str(draft)

    def token_names(self, name: str) -> Mapping[int, str]:
        ids = token_ids(open_files(name).directory)
        return {token: text for text, token in ids.items()}

    def is_cached(self, source: str) -> bool:
        return is_cached(source.removeprefix(EAGLE_PREFIX))

    def sampling_defaults(self, name: str) -> Mapping[str, Any]:
        return read_generation_config(open_files(name, tokenizer=False).directory)

    def stage_files(self, name: str, span: tuple[int, int]) -> list[FilePart]:
        from asyncspec.plugins.hf.model.stage_files import stage_files

        return stage_files(name, span)

    def weight_count(self, name: str) -> int:
        files = open_files(name, tokenizer=False)
        matrices = quantized_tensors(text_config(read_config(files.directory)), files.tensors())
        return sum(prod(tensor.shape) for tensor in matrices.values())

    def footprints(
        self, name: str, spans: Sequence[tuple[int, int]], options: StageOptions
    ) -> list[Footprint]:
        from asyncspec.plugins.hf.model.footprint import (
            footprint,
            language_config,
            level_bytes,
            part_of,
            refused,
            stored_model,
        )

        files = open_files(name, tokenizer=False)
        check_requantized(text_config(read_config(files.directory)), options.quantize)
        info, tensors = stored_model(files)
        how = (options.dtype, options.mode, options.quantize)
        device, kv_type = options.engine.device, options.engine.kv_type
        # Read once: there may be a span for each layer.
        config = language_config(files.directory)

        def of(span: tuple[int, int]) -> Footprint:
            where = (files.directory, info, span)
            levels = level_bytes(tensors, info, span, device)
            more: Any = {"config": config, "device": device, "levels": levels}
            return footprint(*where, *how, kv_type=kv_type, **more)

        parts = refused(config, spans)
        whole = of((0, info.layers)) if parts else None
        return [part_of(whole, span) if whole and span in parts else of(span) for span in spans]

    def refused_spans(
        self, name: str, spans: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], str]:
        from asyncspec.plugins.hf.model.footprint import language_config, refused

        return refused(language_config(open_files(name, tokenizer=False).directory), spans)

    def source_footprint(
        self, name: str, target: str, dtype: DType, device: str = CPU
    ) -> Footprint:
        from asyncspec.plugins.hf.heads.eagle.head import head_footprint
        from asyncspec.plugins.hf.kernels.device import on_accelerator
        from asyncspec.plugins.hf.model.footprint import footprint, level_bytes, stored_model

        if name.startswith(EAGLE_PREFIX) and backend_name(target) != DEFAULT:
            # The type of ``SharingModel.shared_matrix``.
            info = replace(backend_of(target).inspect(target), dtype="float16")
            there = _beside_other(device).is_accelerator
            return head_footprint(name.removeprefix(EAGLE_PREFIX), info, dtype, accelerator=there)
        if backend_name(target) != DEFAULT:
            device = _beside_other(device).name
        files = open_files(target if kind_of(name).loaded_by == "target" else name, tokenizer=False)
        info, tensors = stored_model(files)
        if name.startswith(EAGLE_PREFIX):
            there = on_accelerator(device)
            return head_footprint(name.removeprefix(EAGLE_PREFIX), info, dtype, accelerator=there)
        if name == MTP_NAME:
            from asyncspec.plugins.hf.heads.mtp.head import mtp_footprint

            return mtp_footprint(files, dtype, device)
        quantize = twin_quantize(name) or "none"
        span = (0, info.layers)
        levels = level_bytes(tensors, info, span, device)
        where = (files.directory, info, span, dtype)
        return footprint(*where, "fast", quantize, draft=True, device=device, levels=levels)

    def preload(self, name: str | None) -> None:
        from asyncspec.plugins.hf.kernels.process import light_imports

        with light_imports():
            from asyncspec.plugins.hf.heads import draft_model
            from asyncspec.plugins.hf.kernels.cpu import ort
            from asyncspec.plugins.hf.model import stage
            from asyncspec.plugins.hf.model.shard import make_conversions, model_class

            del draft_model, stage
            ort.is_available()
            make_conversions()
            if name is not None:
                with suppress(AsyncSpecError):
                    model_class(inspect_checkpoint(Path(name)).architecture)

    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def open(self, name: str, *, tokenizer: bool = True) -> OpenModel:
        from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint

        return open_checkpoint(name, tokenizer=tokenizer)

    def load(self, spec: StageSpec) -> StageBackend:
        from asyncspec.plugins.hf.kernels.device import find
        from asyncspec.plugins.hf.model.stage import load_stage

        dtype, mode, quantize = spec.options.dtype, spec.options.mode, spec.options.quantize
        device = find(spec.options.engine.device)
        how: Any = {"dtype": dtype, "mode": mode, "quantize": quantize, "device": device}
        how["kv_type"] = spec.options.engine.kv_type
        return load_stage(spec.model, *spec.layers, results=kept_by_user(BUILDS), **how)

    def check_device(self, wanted: str) -> None:
        name = wanted.casefold()
        kind = re.match("[a-z]*", name)
        assert kind is not None, "it matches nothing at least"
        if name not in NAMES and kind[0] not in NAMES:
            known = ", ".join(sorted(name for name in NAMES if not name.startswith("emulated")))
            raise UserError(f"device {wanted}: torch has none of that name; use one of {known}")
        build = version("torch")
        if kind[0] in ("cuda", "rocm", "xpu") and build.endswith("+cpu"):
            raise UserError(
                f"device {wanted}: torch {build} computes on the CPU alone; use cpu, or install a "
                "torch for that device (docs/guide/install.md)"
            )

    def device_name(self, wanted: str) -> str:
        from asyncspec.plugins.hf.kernels.device import find

        return find(wanted).name

    def device_of(self, wanted: str) -> tuple[str, DeviceMemory | None]:
        from asyncspec.plugins.hf.kernels.device import find

        device = find(wanted)
        return device.description, device.memory()

    def load_source(self, spec: SourceSpec) -> LoadedSource:
        from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint
        from asyncspec.plugins.hf.kernels.device import find

        wanted = spec.options.device
        device = find(wanted) if isinstance(spec.target, Checkpoint) else _beside_other(wanted)
        loaded = self._load_source(spec, device)
        return replace(loaded, device=device.name, device_memory=device.memory)

    def _load_source(self, spec: SourceSpec, device: Any) -> LoadedSource:
        how: Any = {"dtype": spec.dtype, "device": device}
        if spec.name.startswith(EAGLE_PREFIX):
            from asyncspec.plugins.hf.heads.dflash.source import load_dflash
            from asyncspec.plugins.hf.heads.eagle.checkpoint import open_eagle, warn_of_verifier
            from asyncspec.plugins.hf.heads.eagle.parallel import ParallelEagleSource
            from asyncspec.plugins.hf.heads.eagle.source import EagleSource, load_eagle

            opened = open_eagle(spec.name.removeprefix(EAGLE_PREFIX), spec.target.info)
            warn_of_verifier(opened, spec.target.path)
            head: Any
            if opened.description.block:
                head = load_dflash(opened, spec.target, **how)
            else:
                kind = ParallelEagleSource if opened.description.parallel else EagleSource
                head = load_eagle(opened, spec.target, kind=kind, **how)
            return LoadedSource(
                *(head, head.token_bytes, head.features.wanted, head),
                learnable=lambda: _learnable(opened),
            )
        if spec.name == MTP_NAME:
            from asyncspec.plugins.hf.heads.mtp.head import load_mtp

            mtp = load_mtp(spec.target, **how)
            return LoadedSource(mtp, mtp.token_bytes, mtp.features.wanted, mtp)
        from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
        from asyncspec.plugins.hf.heads.draft_model import DraftModel, load_draft

        if (twin := twin_quantize(spec.name)) is not None:
            model = load_draft(spec.target, quantize=twin, **how)
            return LoadedSource(model, model.token_bytes, session_bytes=model.session_bytes)
        checkpoint = open_checkpoint(spec.name)

        def load(vocab: int, foreign: Sequence[int]) -> DraftModel:
            return load_draft(checkpoint, vocab=vocab, foreign=foreign, **how)

        source, draft, usable = load_fitting(spec, self, checkpoint, load)
        how = {"session_bytes": draft.session_bytes, "usable": usable}
        return LoadedSource(source, draft.token_bytes, **how)

    def feature_tensors(self, model: Any, dtype: DType) -> Tensors:
        from asyncspec.plugins.hf.checkpoint.checkpoint import resolve_dtype
        from asyncspec.plugins.hf.model.wire import FeatureTensors

        return FeatureTensors(resolve_dtype(model.info, dtype), model.info.hidden_size)

    def load_tokenizer(self, model: Any, template: str | None = None) -> HFTokenizer:
        return load_tokenizer(model.path, template)


def _learnable(opened: Any) -> Learnable:
    """See ``LoadedSource``."""
    from asyncspec.plugins.hf.training.continued import learnable

    return learnable(opened)


def _beside_other(wanted: str) -> Any:
    """The device of a source for another backend's target, whose library's device ``wanted`` may
    be: the CPU where torch has none of that name."""
    from asyncspec.plugins.hf.kernels.device import CPU, find

    try:
        return find(wanted)
    except UserError:
        return CPU


BACKEND: Backend = HFBackend()
