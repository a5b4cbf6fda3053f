"""What is compared, and what each line of the table is of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from asyncspec.backend.base import DType, Mode
from asyncspec.backend.registry import LLAMA, backend_name
from tools.testbed.create import Network

WARM_UP = 160
"""Tokens of the first prompts, which nobody times: passes of every size set something up."""

CHUNK_ROWS = 64
"""Rows of a chunk on paced stages: where rows cost nothing chunks are as long as they may be."""


class Entry(Struct, frozen=True):
    """What reads prompts."""

    kind: Literal["alone", "stages", "rpc", "vllm"]
    # Stages of a pipeline, else threads.
    count: int
    # Rate of the links between a pipeline's devices; 0: the bare loopback.
    mbit: float = 0.0

    @property
    def pipeline(self) -> bool:
        """Whether it has stages."""
        return self.kind in ("stages", "rpc")


class Setting(Struct, frozen=True):
    """What is compared."""

    target: Path
    vocab: int
    dtype: DType
    mode: Mode
    # By tokens of a prompt and its answer.
    repeats: Mapping[int, int]
    stages: tuple[int, ...]
    # Tokens of the stream beside which one more prompt is read; 0: there is none.
    beside: int = 0
    # Whether this CPU computes with repacked weights of a GGUF file.
    repacked: bool = False
    # Bytes of a token's hidden states between stages, unless they are packed.
    row_bytes: int = 0
    # Rates of links in Mbit/s that pipelines are also measured on.
    links: tuple[float, ...] = ()
    network: Network = "auto"
    # Of a pass at each stage of a pipeline, whatever its rows; 0: as long as the work takes.
    stage_seconds: float = 0.0
    # llama.cpp's sources, built, for its pipeline; an interpreter that has vLLM.
    llama_cpp: Path | None = None
    vllm: Path | None = None

    @property
    def engine(self) -> str:
        """Its name in ``alone_child.py``."""
        return "llama" if backend_name(str(self.target)) == LLAMA else "hf"

    @property
    def weights(self) -> str:
        """Their dtype or layout there."""
        return "repacked" if self.repacked else self.dtype

    @property
    def slots(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return context(self.repeats, self.beside)

    def threads(self, entry: Entry) -> int:
        """Of the engine alone that it is compared with: one for each stage, and no more than there
        are cores."""
        return min(entry.count, os.cpu_count() or 1)

    def entries(self) -> Iterator[Entry]:
        """In the table's order. A lone stage has no link, and is no pipeline of llama.cpp's."""
        threads = sorted({self.threads(Entry("stages", count)) for count in self.stages})
        several = [count for count in self.stages if count > 1]
        for mbit in (0.0, *self.links):
            if not mbit:
                yield from (Entry("alone", count) for count in threads)
                if self.engine == "hf" and self.vllm is not None:
                    yield from (Entry("vllm", count) for count in threads)
            yield from (Entry("stages", n, mbit) for n in (several if mbit else self.stages))
            if self.engine == "llama" and self.llama_cpp is not None:
                yield from (Entry("rpc", count, mbit) for count in several)

    def name(self, entry: Entry) -> str:
        """As the table shows it."""
        match entry.kind:
            case "stages":
                return f"{entry.count} stage{'s' * (entry.count > 1)}"
            case "rpc":
                return f"llama.cpp, RPC pipeline of {entry.count}"
            case "vllm":
                return "vLLM"
            case _:
                return {"hf": "transformers", "llama": "llama.cpp"}[self.engine]

    def fill_bound(self, stages: int, tokens: int) -> float:
        """Seconds that paced stages need at least: the first chunk passes all of them, each further
        one ends a pass later."""
        return (-(-tokens // CHUNK_ROWS) + stages - 1) * self.stage_seconds

    def link_seconds(self, tokens: int, mbit: float) -> float:
        """Seconds for which the busiest link carries a prompt's hidden states."""
        return tokens * self.row_bytes * 8 / (mbit * 1e6)


def context(lengths: Iterable[int], beside: int) -> int:
    """Tokens of the longest prompt and its answer."""
    return max(*lengths, WARM_UP + beside)
