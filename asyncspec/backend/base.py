"""What a backend provides: devices that run jobs (``asyncspec.core.jobs``), and their loading.

A device runs one job at a time, not always on the same thread (``asyncspec.actor.device``): no
state of a device may be bound to a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

from msgspec import Meta, Struct

from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.core.errors import CheckpointError, UserError
from asyncspec.core.jobs import StageJob
from asyncspec.core.tensors import Tensors
from asyncspec.source.base import TokenSource
from asyncspec.source.registry import TWIN_NAME

if TYPE_CHECKING:
    from asyncspec.constraint.grammar import Grammars

DType = Literal["auto", "fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]
"""What to compute in; "auto" is the checkpoint's own type."""

Mode = Literal["exact", "fast"]
"""Numerics of a stage: bitwise the sequential decoder's tokens, or the fastest kernels."""

Quantize = Literal["none", "int8", "int4"]
"""How a stage keeps its weights."""

Guarantee = Literal["bitwise", "tolerance"]
"""Tokens equal those without speculation bit by bit, or up to rounding."""

CPU = "cpu"
"""Name of the device that every machine has."""

TWINS: Mapping[str, Quantize] = {
    TWIN_NAME: "int4",
    f"{TWIN_NAME}:int4": "int4",
    f"{TWIN_NAME}:int8": "int8",
    f"{TWIN_NAME}:none": "none",
}
"""Twins, loaded by the target's backend, and how they keep the target's weights."""


def twin_quantize(source: str) -> Quantize | None:
    """How a twin keeps the weights; None of another token source. Raises ``UserError``."""
    if source.partition(":")[0] != TWIN_NAME:
        return None
    if source not in TWINS:
        raise UserError(
            f"there is no {source}; use {TWIN_NAME}:int4, {TWIN_NAME}:int8 or {TWIN_NAME}:none"
        )
    return TWINS[source]


class DeviceMemory(Struct, frozen=True):
    """Memory in bytes of a device that does not compute in the host's memory."""

    free: int
    # By this process.
    held: int


def host_memory() -> DeviceMemory | None:
    """None: the device computes in the host's memory."""
    return None


class StageBackend(Tensors, Protocol):
    """A block of target layers with its tree cache."""

    @property
    def guarantee(self) -> Guarantee:
        """What the start-up self-test found."""

    @property
    def weights(self) -> str:
        """How the weights are kept, for a log line."""

    @property
    def device(self) -> str:
        """What computes: "cpu", or as an option names it, such as "cuda:0"."""

    def device_memory(self) -> DeviceMemory | None:
        """None: caches are in the host's memory. Called from any thread."""

    def run(self, job: StageJob) -> object | None:
        """Perform a job. Only ``Forward`` and ``Batch`` have a result."""

    def abandon(self, job: StageJob) -> None:
        """The result of a running or queued job is not needed: end it early, with any result.
        The only method called from another thread while a job runs."""

    def constrain(self, grammars: Grammars) -> None:
        """Set how the last stage reads the grammars of sessions; called before the first job."""

    def check(self) -> None:
        """Raise ``AssertionError`` where the cache violates its invariants (tests, idle time)."""

    def cache_bytes(self, slots: int) -> int:
        """Memory of the cache of ``slots`` slots, in bytes."""

    @property
    def session_bytes(self) -> int:
        """Memory of a session beside its slots, in bytes: states of layers without a cache."""

    @property
    def slot_format(self) -> str:
        """What ``Export`` reads out of a slot, and by which code: only a stage that says the same
        can ``Import`` it. Empty: neither is possible."""

    def pass_seconds(self) -> dict[int, float]:
        """Measured seconds of a pass by its number of rows, ascending: a draft node knows from the
        first request on how many rows are cheap. Leaves the stage as it was."""


class ModelInfo(Struct, frozen=True):
    """What a checkpoint's configuration says of its model."""

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    # Longest sequence in tokens the model was made for.
    context_length: int
    # Any of them ends an answer; may be empty.
    eos_token_ids: tuple[int, ...]
    # "float32", "float16" or "bfloat16"; "" where the configuration does not say.
    dtype: str
    # Whether a session may begin with a part of another's slots: not where layers have a state.
    shares_prefixes: bool = True
    # Whether its states are kept where ``kept_state`` says, so that a session may begin there.
    keeps_states: bool = False
    # What bounds the context where it is not the length the model was made for; for messages.
    context_reason: str = ""


class OpenModel(Protocol):
    """A model whose files have been read through and fit together; no weights are loaded."""

    @property
    def info(self) -> ModelInfo:
        """Its configuration."""

    @property
    def fingerprint(self) -> str:
        """Equal on all nodes with the same model."""

    def computed_dtype(self, dtype: DType) -> str:
        """Name of the type that ``dtype`` means, as in ``Hello.dtype``."""


SharedMatrix = Literal["embedding", "head"]


class SharingModel(OpenModel, Protocol):
    """An ``OpenModel`` whose EAGLE heads another backend computes."""

    def shared_matrix(self, name: SharedMatrix) -> Any:
        """An array [vocab, hidden] of float16. Raises ``CheckpointError``."""


KVType = Literal["auto", "f16", "q8_0"]
FlashAttention = Literal["auto", "on", "off"]
Repack = Literal["auto", "off"]


class EngineOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """``[llama]``: how llama.cpp computes a GGUF target and its draft model."""

    # In place of [target] device.
    device: str = "auto"
    # A stage's last layers that the GPU computes; -1: all.
    gpu_layers: Annotated[int, Meta(ge=-1)] = -1
    # In place of [target] kv_type.
    kv_type: KVType = "auto"
    # "auto": where the device has it.
    flash_attention: FlashAttention = "auto"
    # Quantised weights in the CPU's fastest layout: "auto", where a child process finds that it
    # works and keeps the guarantee.
    repack: Repack = "auto"


DEFAULT_OPTIONS = EngineOptions()


class StageOptions(Struct, frozen=True):
    """How the stages of a target compute."""

    dtype: DType = "auto"
    mode: Mode = "exact"
    quantize: Quantize = "none"
    engine: EngineOptions = DEFAULT_OPTIONS


class StageSpec(Struct, frozen=True):
    """Layers [first, end) of a target and how to run them."""

    model: Any  # an OpenModel of the same backend
    layers: tuple[int, int]
    options: StageOptions = StageOptions()


class SourceSpec(Struct, frozen=True):
    """A token source and the target it drafts for."""

    # Without the names of mixes: a model, ``eagle:DIR``, ``mtp``, or a twin.
    name: str
    target: Any  # an OpenModel; of the same backend for kinds that are ``loaded_by`` the target's
    dtype: DType = "auto"
    options: EngineOptions = DEFAULT_OPTIONS
    # The target's ``Backend``; None: the one that loads the source.
    target_backend: Any = None


class Learnable(Struct, frozen=True):
    """A head that can go on learning while it drafts (``asyncspec.backend.learning``)."""

    # As ``Setup.make`` names what trains it.
    make: str
    # Its folder.
    folder: str
    # Equal for equal weights.
    fingerprint: str


class LoadedSource(Struct, frozen=True):
    """A token source with its weights in memory."""

    source: TokenSource
    # Memory per committed token of a session and per tree node, in bytes; 0: negligible.
    token_bytes: int = 0
    # Target hidden states it reads, as in ``Open.features``, and how they are unpacked.
    features: tuple[int, ...] = ()
    tensors: Tensors | None = None
    # Memory of a session beside its tokens, in bytes.
    session_bytes: int = 0
    # For a draft by text, the share of its tokens that can be said in the target's.
    usable: float | None = None
    # As in ``StageBackend``.
    device: str = CPU
    device_memory: Callable[[], DeviceMemory | None] = host_memory
    # How it goes on learning; None: it cannot. Raises ``UserError`` for a head that cannot.
    learnable: Callable[[], Learnable] | None = None


class Footprint(Struct, frozen=True):
    """Memory of a stage or a token source, in bytes."""

    layers: tuple[int, int]
    # Weights of its layers, of the embedding (first stage), and of norm and head (last stage).
    weights: int
    # Cache per token or tree node.
    slot: int
    # Scores of one layer, per slot that a pass over a chunk of the prompt sees.
    scores: int
    # Results of passes and of the self-test.
    results: int = 0
    # Part of the weights that is an embedding, which passes look rows up in and do not read.
    embedding: int = 0
    # Cache per session, whatever its length.
    session: int = 0
    # Part of the results that are states of recurrent layers, for any number of sessions.
    states: int = 0


SAMPLE_BYTES = 1024
"""That a fingerprint reads at the beginning, in the middle and at the end of each tensor. To
read all of a large model would take minutes; further training or another revision changes a model
nearly everywhere."""


class FilePart(Struct, frozen=True):
    """Bytes [offset, offset + length) of a model's file."""

    file: Path
    offset: int
    length: int


def whole_file(file: Path) -> FilePart:
    """All of it."""
    return FilePart(file, 0, file.stat().st_size)


def sampled_parts(file: Path, offset: int, size: int) -> list[FilePart]:
    """What a fingerprint reads of a tensor of ``size`` bytes."""
    length, last = min(size, SAMPLE_BYTES), max(0, size - SAMPLE_BYTES)
    return [FilePart(file, offset + at, length) for at in (0, last // 2, last)]


@runtime_checkable
class Backend(Protocol):
    """An implementation of models. Names of models are paths, Hub ids or ``BACKEND:...``, as in
    cluster files. Every method raises ``UserError`` (``CheckpointError`` for a model that cannot
    be used) with a sentence that says what to change."""

    @property
    def library(self) -> str:
        """What ``open`` imports, for the progress display."""

    @property
    def runtime_bytes(self) -> int:
        """Memory of a stage's process besides weights, caches and scores."""

    # Before a node starts: from small files alone, without the libraries that compute.

    def model_name(self, name: str) -> str:
        """A model's name as users write it."""
        return name

    def locate(self, name: str) -> str:
        """An absolute name for other processes of this machine. Downloads models of the Hub."""

    def inspect(self, name: str) -> ModelInfo:
        """The model's configuration. Of a model on the Hub no weights are downloaded."""

    def check_target(self, name: str) -> ModelInfo:
        """As ``inspect``; raises also where weights or tokenizer are missing or broken."""
        return self.inspect(name)

    def check_source(self, name: str, target: str) -> str:
        """The absolute name of a token source that fits the target."""

    def is_cached(self, source: str) -> bool:
        """Whether a token source of the Hub is in the cache. Sends no request."""
        return False

    def sampling_defaults(self, name: str) -> Mapping[str, Any]:
        """Sampling settings that the model's authors recommend (``generation_config.json``)."""
        return {}

    def token_names(self, name: str) -> Mapping[int, str]:
        """A model's tokens by id, spelt as in ``tokenizer.json`` and GGUF files: equal ones of two
        models, of whichever backends, mean the same. Raises ``UserError`` where it has no such
        names: then no model of another backend drafts for it."""
        raise CheckpointError(f"no checkpoint and no GGUF file drafts for {name}; use its own kind")

    def stage_files(self, name: str, span: tuple[int, int]) -> list[FilePart]:
        """What ``open`` without tokenizer and ``load`` of these layers read of a local model.
        Raises ``UserError`` for one that is not made of files."""
        raise UserError(f"{name} has no files to send")

    def weight_count(self, name: str) -> int:
        """Numbers in the weights of a model that can be its own twin; 0 where none can."""
        return 0

    # Memory, from configurations alone (SpecPipe 4.5). May import the libraries.

    def footprints(
        self, name: str, spans: Sequence[tuple[int, int]], options: StageOptions
    ) -> list[Footprint]:
        """Footprints of stages with the layers ``spans``, also where they are ``refused_spans``."""

    def refused_spans(
        self, name: str, spans: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], str]:
        """Those of ``spans`` whose layers cannot be a stage, each with the reason."""
        return {}

    def source_footprint(
        self, name: str, target: str, dtype: DType, device: str = CPU
    ) -> Footprint:
        """Footprint of a token source on a device as an option names it, here or elsewhere."""

    def check_device(self, wanted: str) -> None:
        """Raise ``UserError`` where the library as it is installed has no such device, as far as
        can be told without importing it."""
        return

    @property
    def builds(self) -> Sequence[str]:
        """Packages whose code computes a stage."""
        return ()

    # In a node, after the thread settings are made (``asyncspec.backend.threads``).

    def preload(self, name: str | None) -> None:
        """Import what every node imports, and what the model ``name`` needs."""
        return

    def threads(self) -> int:
        """Threads that share a product in this process."""
        return 1

    def device_name(self, wanted: str) -> str:
        """The device of this machine that an option means. Imports the library. Raises
        ``UserError``."""
        return CPU

    def device_of(self, wanted: str) -> tuple[str, DeviceMemory | None]:
        """A device of this machine that an option means, described, and its memory. Imports the
        library."""
        return CPU, None

    def open(self, name: str, *, tokenizer: bool = True) -> OpenModel:
        """Read through a model's files. ``tokenizer``: also fetch its tokenizer."""

    def load(self, spec: StageSpec) -> StageBackend:
        """Load a stage and run its self-test."""

    def load_source(self, spec: SourceSpec) -> LoadedSource:
        """Load a draft model, a head or a twin."""

    def feature_tensors(self, model: Any, dtype: DType) -> Tensors:
        """Tensors of a node that passes features of ``model`` on to the token source's node."""

    def load_tokenizer(self, model: Any, template: str | None = None) -> Tokenizer:
        """Tokenizer of an ``OpenModel``. ``template``: a chat template (Jinja) in place of its
        own."""
