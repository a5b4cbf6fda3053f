"""The llama.cpp backend: GGUF files on whatever llama.cpp computes on. The library is loaded inside
the functions that need it; what a file says of its model needs none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from asyncspec.backend.base import (
    CPU,
    DEFAULT_OPTIONS,
    Backend,
    DeviceMemory,
    DType,
    EngineOptions,
    FilePart,
    Footprint,
    LoadedSource,
    ModelInfo,
    SourceSpec,
    StageOptions,
    StageSpec,
    twin_quantize,
)
from asyncspec.backend.draft_vocabulary import load_fitting
from asyncspec.backend.kept_results import kept_by_user
from asyncspec.backend.registry import DEFAULT, LLAMA, backend, backend_name, backend_of
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.core.tensors import Tensors
from asyncspec.plugins.llama.attention import flash_type
from asyncspec.plugins.llama.cut import refused
from asyncspec.plugins.llama.footprint import footprint, slot_bytes, stage_files
from asyncspec.plugins.llama.model_file import PREFIX, locate, short_name
from asyncspec.plugins.llama.target import OpenTarget, open_target, vocabulary
from asyncspec.plugins.llama.trial import ensure_loads
from asyncspec.source.registry import EAGLE_PREFIX, MTP_NAME

_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Our names of settings, and those of ``general.sampling.*``."""

BUILDS = ("llama_cpp", "numpy")
"""Packages whose code computes a stage."""


class LlamaBackend(Backend):
    """Backend of GGUF files."""

    library = "llama.cpp"
    builds = BUILDS

    @property
    def runtime_bytes(self) -> int:
        from asyncspec.plugins.llama.library import has_cuda

        # Measured: 60 MiB for Python and the bindings, 20 to 50 for llama.cpp and its graphs; of a
        # build for CUDA 125 more, whatever the stage computes on (an H100's driver 580).
        return (120 + (140 if has_cuda() else 0)) << 20

    def model_name(self, name: str) -> str:
        return short_name(name)

    def locate(self, name: str) -> str:
        path = str(locate(name).absolute())
        return path if backend_name(path) == LLAMA else f"{PREFIX}{path}"

    def inspect(self, name: str) -> ModelInfo:
        return self.open(name).info

    def check_target(self, name: str) -> ModelInfo:
        from asyncspec.plugins.llama.library import bindings

        bindings()
        return self.inspect(name)

    def check_source(self, name: str, target: str) -> str:
        if name.startswith(EAGLE_PREFIX):
            return backend(DEFAULT).check_source(name, target)
        _check_source(name)
        if backend_name(target) != LLAMA:
            from asyncspec.plugins.llama.library import import_bindings

            import_bindings()
        backend_of(target).token_names(target)
        self.token_names(name)
        return self.locate(name)

    def token_names(self, name: str) -> Mapping[int, str]:
        return dict(enumerate(vocabulary(self.open(name).model)))

    def sampling_defaults(self, name: str) -> Mapping[str, Any]:
        model = self.open(name).model
        said = {ours: model.get(f"general.sampling.{key}") for ours, key in _SAMPLING.items()}
        return {name: value for name, value in said.items() if value is not None}

    def footprints(
        self, name: str, spans: Sequence[tuple[int, int]], options: StageOptions
    ) -> list[Footprint]:
        target = self.open(name)
        _check(target, options)
        engine, mode = options.engine, options.mode
        flash = flash_type(engine, mode, on_gpu=not _may_be_cpu(engine.device))
        return [footprint(target, span, engine.kv_type, mode, flash) for span in spans]

    def refused_spans(
        self, name: str, spans: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], str]:
        return refused(self.open(name).model, spans)

    def source_footprint(
        self, name: str, target: str, dtype: DType, device: str = CPU
    ) -> Footprint:
        if name.startswith(EAGLE_PREFIX):
            return backend(DEFAULT).source_footprint(name, target, dtype, device)
        _check_source(name)
        draft = self.open(name)
        flash = flash_type(DEFAULT_OPTIONS, "fast", on_gpu=not _may_be_cpu(device))
        return footprint(draft, (0, draft.info.layers), mode="fast", flash=flash)

    def stage_files(self, name: str, span: tuple[int, int]) -> list[FilePart]:
        return stage_files(self.open(name), span)

    def preload(self, name: str | None) -> None:
        from asyncspec.plugins.llama import draft_model, stage, tokenizer
        from asyncspec.plugins.llama.library import import_bindings

        del draft_model, stage, tokenizer
        # Not initialised: a process that is forked of one with a GPU cannot use it.
        import_bindings()

    def threads(self) -> int:
        from asyncspec.plugins.llama.library import threads

        return threads()

    def device_name(self, wanted: str) -> str:
        from asyncspec.plugins.llama.devices import find

        device = find(wanted)
        return CPU if device is None else device.name

    def device_of(self, wanted: str) -> tuple[str, DeviceMemory | None]:
        from asyncspec.plugins.llama.devices import find

        device = find(wanted)
        if device is None:
            return CPU, None
        return f"{device.name} ({device.description})", device.memory()

    def open(self, name: str, *, tokenizer: bool = True) -> OpenTarget:
        return open_target(locate(name))

    def load(self, spec: StageSpec) -> Any:
        from asyncspec.plugins.llama.stage import load_stage

        options = spec.options
        _check(spec.model, options)
        results = kept_by_user(BUILDS)
        ensure_loads(spec.model, *spec.layers, results)
        how: Any = {"mode": options.mode, "options": options.engine, "results": results}
        return load_stage(spec.model, *spec.layers, **how)

    def load_source(self, spec: SourceSpec) -> LoadedSource:
        from asyncspec.plugins.llama.devices import find
        from asyncspec.plugins.llama.draft_model import LlamaDraft, load_draft

        if spec.name.startswith(EAGLE_PREFIX):
            # Heads are safetensors files, computed by torch.
            return backend(DEFAULT).load_source(spec)
        _check_source(spec.name)
        draft = self.open(spec.name)
        options = spec.options
        if not isinstance(spec.target, OpenTarget):
            options = _beside_other(options)
        ensure_loads(draft, 0, draft.info.layers, kept_by_user(BUILDS))

        def load(vocab: int, foreign: Sequence[int]) -> LlamaDraft:
            return load_draft(draft, vocab, options, foreign)

        proposing, loaded, usable = load_fitting(spec, self, draft, load)
        source = LoadedSource(proposing, loaded.token_bytes, usable=usable)
        if (gpu := find(options.device)) is None:
            return source
        cell = slot_bytes(draft, (0, draft.info.layers), "auto")

        def memory() -> DeviceMemory | None:
            return gpu.memory(loaded.engine.held_bytes(cell))

        return replace(source, device=gpu.name, device_memory=memory)

    def feature_tensors(self, model: OpenTarget, dtype: DType) -> Tensors:
        raise CheckpointError("no EAGLE head drafts for GGUF targets; use another source")

    def load_tokenizer(self, model: OpenTarget, template: str | None = None) -> Any:
        from asyncspec.plugins.llama.tokenizer import LlamaTokenizer

        ensure_loads(model, 0, 0, kept_by_user(BUILDS))
        return LlamaTokenizer(model, template)


def _check(target: OpenTarget, options: StageOptions) -> None:
    target.computed_dtype(options.dtype)
    if options.quantize != "none":
        raise UserError(f"a GGUF file is quantised as it is; leave quantize {options.quantize} out")


def _beside_other(options: EngineOptions) -> EngineOptions:
    """Those of a draft model for another backend's target, whose library's device they may name: on
    the CPU where llama.cpp has none of that name."""
    from asyncspec.plugins.llama.devices import find

    try:
        find(options.device)
    except UserError:
        return replace(options, device=CPU)
    return options


def _may_be_cpu(device: str) -> bool:
    """Whether an option may mean the CPU; GPUs are not asked for, which would start them."""
    return device in (CPU, "auto")


def _check_source(source: str) -> None:
    """Raises ``CheckpointError`` for what no GGUF file is."""
    if source == MTP_NAME:
        raise CheckpointError(
            "the next-token layers of GGUF files are not supported; use another source than mtp, "
            "or the checkpoint that the file was made of"
        )
    if twin_quantize(source) is not None:
        raise CheckpointError(
            f"{source} does not quantise GGUF targets; give a smaller quantisation of the same "
            "model as draft (--draft FILE.gguf)"
        )


BACKEND: Backend = LlamaBackend()
