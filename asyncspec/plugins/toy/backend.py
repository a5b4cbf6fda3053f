"""The toy backend: clusters without weights and without torch.

A target is called ``toy:`` and settings of ``ToyTarget`` (``toy:layers=8,vocab=32``); ``toy:`` as a
token source is one that knows the target, with settings of ``ToySourceConfig``, ``eagle:toy`` one
that reads the target's final hidden states, and ``twin`` the best one, however it is quantised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from asyncspec.backend.base import (
    CPU,
    Backend,
    DType,
    Footprint,
    LoadedSource,
    ModelInfo,
    SourceSpec,
    StageOptions,
    StageSpec,
    twin_quantize,
)
from asyncspec.backend.tokenizer import conversation
from asyncspec.core.errors import CheckpointError, InputProblem
from asyncspec.core.tensors import Tensors
from asyncspec.plugins.toy.model import DTYPE, ToyModel, ToyStage
from asyncspec.plugins.toy.source import ToyEagle, ToyFeatures, ToySource
from asyncspec.source.registry import EAGLE_PREFIX, TWIN_NAME
from asyncspec_protocol.limits import ITEM_BYTES
from asyncspec_protocol.messages import FINAL

PREFIX = "toy:"
HEAD = f"{EAGLE_PREFIX}toy"

_TWIN_TOP = 1.3
"""``ToySource.top`` that makes it as certain as it can be of every node."""


class ToyTarget(ToyModel, frozen=True, forbid_unknown_fields=True):
    """A toy target, opened: its fields are the settings."""

    vocab: int = 96

    @property
    def fingerprint(self) -> str:
        return PREFIX + msgspec.json.encode(self).decode()

    def computed_dtype(self, dtype: DType) -> str:
        return DTYPE


class ToySourceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a toy token source, see ``ToySource``."""

    top: float = 0.65
    seed: int = 1


class ToyTokenizer:
    """Printable ASCII characters and the line break, a token each; everything else is "?". Of a
    smaller vocabulary a token stands for several characters and is written as the first."""

    has_template = True
    template = ""
    decodes_as_whole = False

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._token(character) for character in text)

    def render(self, chat: str) -> tuple[int, ...]:
        return self.encode(self.prompt(chat))

    def prompt(self, chat: str) -> str:
        """The messages' texts, line by line."""
        messages, _, _ = conversation(chat)
        return "".join(f"{message.get('content', '')}\n" for message in messages)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("\n" if token == 95 else chr(32 + token % 95) for token in ids)

    def spell(self, token: int) -> bytes:
        return self.decode((token,)).encode()

    def is_special(self, token: int) -> bool:
        return False

    def is_byte(self, token: int) -> bool:
        return False

    def close(self) -> None:
        """There is no process."""

    def _token(self, character: str) -> int:
        number = 95 if character == "\n" else ord(character) - 32
        return (number if 0 <= number <= 95 else ord("?") - 32) % self._vocab


C = TypeVar("C", ToyTarget, ToySourceConfig)


def _settings(name: str, kind: type[C]) -> C:
    """Raises ``CheckpointError`` for a setting there is not."""
    pairs = (part.partition("=") for part in name.removeprefix(PREFIX).split(",") if part)
    try:
        return msgspec.convert({key: value for key, _, value in pairs}, kind, strict=False)
    except msgspec.ValidationError as error:
        problem = InputProblem.of(error).sentence("setting")
        fields = ", ".join(kind.__struct_fields__)
        raise CheckpointError(f"{name}: {problem}; the settings are {fields}") from None


class ToyBackend(Backend):
    """Backend of clusters without weights."""

    library = "toy"
    runtime_bytes = 64 << 20

    def locate(self, name: str) -> str:
        return name

    def inspect(self, name: str) -> ModelInfo:
        return self.open(name).info

    def check_source(self, name: str, target: str) -> str:
        if twin := twin_quantize(name):
            name = f"{TWIN_NAME}:{twin}"
        elif not name.startswith(EAGLE_PREFIX):
            _settings(name, ToySourceConfig)
        elif name != HEAD:
            raise CheckpointError(f"{name}: the head of a toy target is {HEAD}")
        if not target.startswith(PREFIX):
            raise CheckpointError(f"{name} drafts for toy targets only; use another token source")
        return name

    def footprints(
        self, name: str, spans: Sequence[tuple[int, int]], options: StageOptions
    ) -> list[Footprint]:
        return [Footprint(span, 0, ITEM_BYTES[DTYPE] * (span[1] - span[0]), 0) for span in spans]

    def source_footprint(
        self, name: str, target: str, dtype: DType, device: str = CPU
    ) -> Footprint:
        return Footprint((0, 0), 0, 0, 0)

    def open(self, name: str, *, tokenizer: bool = True) -> ToyTarget:
        target = _settings(name, ToyTarget)
        if min(target.layers, target.vocab, target.context) < 1:
            raise CheckpointError(f"{name}: layers, vocab and context are at least 1")
        return target

    def load(self, spec: StageSpec) -> ToyStage:
        return ToyStage(spec.model, *spec.layers)

    def load_source(self, spec: SourceSpec) -> LoadedSource:
        if not isinstance(spec.target, ToyTarget):
            raise CheckpointError(f"{spec.name} drafts for toy targets only")
        if spec.name == HEAD:
            eagle = ToyEagle(spec.target, (FINAL,))
            return LoadedSource(eagle, 0, eagle.features, eagle)
        if twin_quantize(spec.name):
            return LoadedSource(ToySource(spec.target, _TWIN_TOP), 0)
        settings = _settings(spec.name, ToySourceConfig)
        return LoadedSource(ToySource(spec.target, settings.top, settings.seed), 0)

    def feature_tensors(self, model: ToyTarget, dtype: DType) -> Tensors:
        return ToyFeatures()

    def load_tokenizer(self, model: ToyTarget, template: str | None = None) -> ToyTokenizer:
        return ToyTokenizer(model.vocab)


BACKEND: Backend = ToyBackend()
