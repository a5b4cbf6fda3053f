"""The toy backend: clusters without weights and without torch.

A target is called ``toy:`` and settings of ``ToyConfig`` (``toy:layers=8,vocab=32``); ``toy:`` as a
token source is one that knows the target, with settings of ``ToySourceConfig``, and ``eagle:toy``
one that reads the target's final hidden states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from asyncspec.backend.base import (
    EAGLE,
    Backend,
    DType,
    Footprint,
    Guarantee,
    LoadedSource,
    Mode,
    ModelInfo,
    Quantize,
    SourceSpec,
    StageSpec,
)
from asyncspec.backend.toy.eagle import ToyEagle
from asyncspec.backend.toy.model import ToyModel, ToySource, ToyStage
from asyncspec.core.errors import CheckpointError, InputProblem
from asyncspec_protocol.messages import FINAL

PREFIX = "toy:"
HEAD = f"{EAGLE}toy"
_DTYPE = "uint64"
_ITEM_BYTES = 8


class ToyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a toy target."""

    layers: int = 4
    vocab: int = 96
    seed: int = 0
    context: int = 4096
    attention: Literal["all", "parent"] = "all"


class ToySourceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a toy token source, see ``ToySource``."""

    top: float = 0.65
    seed: int = 1


class OpenToy(Struct, frozen=True):
    """See ``OpenModel``."""

    name: str
    config: ToyConfig

    @property
    def model(self) -> ToyModel:
        """The target itself."""
        config = self.config
        return ToyModel(config.layers, config.vocab, config.seed, config.attention)

    @property
    def info(self) -> ModelInfo:
        """See ``OpenModel``."""
        config = self.config
        return ModelInfo("Toy", config.layers, 1, config.vocab, config.context, (), _DTYPE)

    @property
    def fingerprint(self) -> str:
        """See ``OpenModel``."""
        return PREFIX + msgspec.json.encode(self.config).decode()

    def computed_dtype(self, dtype: DType) -> str:
        """See ``OpenModel``."""
        return _DTYPE


class LoadedToyStage(ToyStage):
    """See ``LoadedStage``."""

    guarantee: Guarantee = "bitwise"
    weights = _DTYPE

    def cache_bytes(self, slots: int) -> int:
        """See ``LoadedStage``."""
        return slots * _ITEM_BYTES * len(self._layers)

    def pass_seconds(self) -> dict[int, float]:
        """See ``LoadedStage``. Some 5 us for a row and layer."""
        return {rows: 5e-6 * rows * len(self._layers) for rows in (1, 16)}


class ToyTokenizer:
    """Printable ASCII characters and the line break, a token each; everything else is "?". Of a
    smaller vocabulary a token stands for several characters and is written as the first."""

    has_template = True
    reshapes = False

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def encode(self, text: str) -> tuple[int, ...]:
        """See ``Tokenizer``."""
        return tuple(self._token(character) for character in text)

    def render(self, chat: str) -> tuple[int, ...]:
        """See ``Tokenizer``: the messages' texts, line by line."""
        return self.encode("".join(f"{message['content']}\n" for message in json.loads(chat)))

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return "".join("\n" if token == 95 else chr(32 + token % 95) for token in ids)

    def spell(self, token: int) -> bytes:
        """See ``Tokenizer``."""
        return self.decode((token,)).encode()

    def is_left_out(self, token: int) -> bool:
        """See ``Tokenizer``."""
        return False

    def is_loose(self, token: int) -> bool:
        """See ``Tokenizer``."""
        return False

    def _token(self, character: str) -> int:
        number = 95 if character == "\n" else ord(character) - 32
        return (number if 0 <= number <= 95 else ord("?") - 32) % self._vocab


C = TypeVar("C", ToyConfig, ToySourceConfig)


def _settings(name: str, kind: type[C]) -> C:
    """Raises ``CheckpointError`` for a setting there is not."""
    pairs = (part.partition("=") for part in name.removeprefix(PREFIX).split(",") if part)
    try:
        return msgspec.convert({key: value for key, _, value in pairs}, kind, strict=False)
    except msgspec.ValidationError as error:
        problem = InputProblem.of(error).sentence("setting")
        known = ", ".join(kind.__struct_fields__)
        raise CheckpointError(f"{name}: {problem}; the settings are {known}") from None


class ToyBackend:
    """See ``Backend``."""

    library = "toy"
    runtime_bytes = 64 << 20

    def model_name(self, name: str) -> str:
        """See ``Backend``."""
        return name

    def locate(self, name: str) -> str:
        """See ``Backend``."""
        return name

    def inspect(self, name: str) -> ModelInfo:
        """See ``Backend``."""
        return self.open(name).info

    def check_target(self, name: str) -> ModelInfo:
        """See ``Backend``."""
        return self.inspect(name)

    def check_source(self, name: str, target: str) -> str:
        """See ``Backend``."""
        if not name.startswith(EAGLE):
            _settings(name, ToySourceConfig)
        elif name != HEAD:
            raise CheckpointError(f"{name}: the head of a toy target is {HEAD}")
        if not target.startswith(PREFIX):
            raise CheckpointError(f"{name} drafts for toy targets only; use another token source")
        return name

    def sampling_defaults(self, name: str) -> Mapping[str, Any]:
        """See ``Backend``."""
        return {}

    def footprints(
        self,
        name: str,
        spans: Sequence[tuple[int, int]],
        dtype: DType,
        mode: Mode,
        quantize: Quantize,
    ) -> list[Footprint]:
        """See ``Backend``."""
        return [Footprint(span, 0, _ITEM_BYTES * (span[1] - span[0]), 0) for span in spans]

    def source_footprint(self, name: str, target: str, dtype: DType) -> Footprint:
        """See ``Backend``."""
        return Footprint((0, 0), 0, 0, 0)

    def preload(self, name: str | None) -> None:
        """See ``Backend``."""

    def threads(self) -> int:
        """See ``Backend``."""
        return 1

    def open(self, name: str, *, tokenizer: bool = True) -> OpenToy:
        """See ``Backend``."""
        config = _settings(name, ToyConfig)
        if min(config.layers, config.vocab, config.context) < 1:
            raise CheckpointError(f"{name}: layers, vocab and context are at least 1")
        return OpenToy(name, config)

    def load(self, spec: StageSpec) -> LoadedToyStage:
        """See ``Backend``."""
        return LoadedToyStage(spec.model.model, *spec.layers)

    def load_source(self, spec: SourceSpec) -> LoadedSource:
        """See ``Backend``."""
        if not isinstance(spec.target, OpenToy):
            raise CheckpointError(f"{spec.name} drafts for toy targets only")
        model = spec.target.model
        if spec.name == HEAD:
            eagle = ToyEagle(model, (FINAL,))
            return LoadedSource(eagle, 0, eagle.features, eagle)
        settings = _settings(spec.name, ToySourceConfig)
        return LoadedSource(ToySource(model, settings.top, settings.seed), 0)

    def load_tokenizer(self, model: OpenToy, template: str | None = None) -> ToyTokenizer:
        """See ``Backend``."""
        return ToyTokenizer(model.config.vocab)


BACKEND: Backend = ToyBackend()
