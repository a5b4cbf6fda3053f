"""What is compared: one target, one draft model, and a quota that every device has."""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import DType, Mode, Quantize
from asyncspec.core.errors import UserError
from tools.bench.enlarge import Size
from tools.bench.limits.requests import OPENINGS
from tools.testbed.create import Network
from tools.testbed.description import load
from tools.testbed.tables import Description, DeviceTable

POLICIES = ("flow", "flowspec", "chunked", "autoregressive")
LOOKUP_POLICIES = ("flow",)
"""Also with lookup in the text beside the draft model or a head: ``ngram``, no model more."""
LOOKUP = " + lookup"
"""Behind the names of such peers."""
LIKE = "lan-1000"
"""The ready-made bed whose network ours have."""


class Engine(Struct, frozen=True):
    """Another engine, running already, by its OpenAI endpoint."""

    name: str
    # Up to and with ``/v1``; no slash at its end.
    url: str
    model: str


class Source(Struct, frozen=True):
    """Where the tokens of some of our peers come from."""

    # Behind a policy's name.
    name: str
    policies: tuple[str, ...]
    # The EAGLE head in place of the draft model.
    head: bool = False
    # Also the text.
    lookup: bool = False


class Comparison(Struct, frozen=True):
    """One run of the bench."""

    target: Path
    draft: Path
    # What the target is enlarged to first; None: it stays as it is.
    size: Size | None
    # The type its weights are stored in then; None: the one they are stored in before.
    stored: torch.dtype | None = None
    # What our stages of checkpoints compute in, and how they keep their weights.
    dtype: DType = "auto"
    quantize: Quantize = "none"
    # Of ours, ``generate`` and llama.cpp.
    device: str = "cpu"
    stages: int = 4
    # Cores of each device, the draft device too.
    cpu: float = 0.4
    repeats: int = 3
    # New tokens of an answer.
    tokens: int = 48
    prompts: tuple[str, ...] = OPENINGS
    engines: tuple[Engine, ...] = ()
    # Sources of llama.cpp, built; None: it is not compared.
    llama_cpp: Path | None = None
    # An interpreter that has vLLM; None: it is not compared.
    vllm: Path | None = None
    # The type that the GGUF target's weights have; "stored": the one of the checkpoint.
    gguf: str = "stored"
    # Of our stages. "fast": llama.cpp's own pipeline promises no equal bits either.
    mode: Mode = "fast"
    network: Network = "auto"
    # One way, between any two of our devices, and of llama.cpp's pipeline.
    latency_ms: float = 0.0
    # Of a stage's pass in our pipelines and llama.cpp's, what the real work leaves of it being
    # waited for; 0: as long as the work takes.
    stage_seconds: float = 0.0
    # An EAGLE head for the target; None: ours draft with the draft model only.
    head: Path | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Of our peers; a cluster each."""
        found = Source("", POLICIES), Source(LOOKUP, LOOKUP_POLICIES, lookup=True)
        if self.head is None:
            return found
        return *found, Source(f", head{LOOKUP}", LOOKUP_POLICIES, head=True, lookup=True)

    @property
    def exact(self) -> bool:
        """Whether our stages of checkpoints do the same sums as ``generate``."""
        ours = self.mode, self.dtype, self.quantize, self.device
        return ours == ("exact", "fp32", "none", "cpu")

    @property
    def vllm_dtype(self) -> str:
        """What vLLM computes in: as ours, or float32 as ``generate``."""
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.dtype, "float32")

    @property
    def devices(self) -> int:
        """Draft device and stages."""
        return self.stages + 1

    @property
    def all_cores(self) -> float:
        """Of all our devices together."""
        return round(self.cpu * self.devices, 6)

    def our_bed(self) -> Description:
        """Equal devices on a switch. Raises ``UserError``."""
        network = replace(load(LIKE).network, latency_ms=self.latency_ms)
        return Description(device=(DeviceTable(cpu=self.cpu),) * self.devices, network=network)

    def generate_bed(self) -> Description:
        """Two devices that do not talk: device 0 has the quota of one of ours, device 1 that of all
        of them."""
        return Description(device=(DeviceTable(cpu=self.cpu), DeviceTable(cpu=self.all_cores)))


def read_engines(named: list[str], models: list[str]) -> tuple[Engine, ...]:
    """Engines from ``NAME=URL`` and either one model for all or one for each. Raises
    ``UserError``."""
    if len(models) not in ({1, len(named)} if named else {0}):
        raise UserError(
            f"--endpoint-model: {len(models)} given for {len(named)} of --endpoint; "
            "give one for all, or one for each"
        )
    engines = []
    each = models * len(named) if len(models) == 1 else models
    for text, model in zip(named, each, strict=True):
        name, _, url = text.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise UserError(f"--endpoint {text!r}: give NAME=URL, as in vllm=http://host:8000/v1")
        engines.append(Engine(name, url.rstrip("/"), model))
    if len({engine.name for engine in engines}) < len(engines):
        raise UserError("--endpoint: two engines have the same name")
    return tuple(engines)
