"""Run in a process of its own: loads a stage of a GGUF model as a node does, fills a cache, prunes
rows again and again, and prints the highest memory it took and what was predicted, in bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import asyncspec_nodes.node.command
import asyncspec_nodes.node.process  # noqa: F401
from asyncspec.backend.base import EngineOptions, StageOptions, StageSpec
from asyncspec.backend.reference import SESSION, chain
from asyncspec.core.jobs import Admit, Compact
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.llama.backend import BACKEND

SLOTS, WIDE = 540, 60
PRUNED = 20
"""Times."""

ON_CPU = StageOptions(engine=EngineOptions(device="cpu"))


def main(name: str, first: int, last: int) -> dict[str, float]:
    model, span = BACKEND.open(name), (first, last)
    stage = BACKEND.load(StageSpec(model, span, ON_CPU))
    stage.run(Admit(SESSION, SLOTS, Sampling()))
    end = SLOTS - WIDE
    for start in (*range(0, end, WIDE), *[end] * PRUNED):
        hidden = stage.noise(WIDE) if first else None  # type: ignore[attr-defined]
        sampled = (WIDE - 1,) if last == model.info.layers else ()
        stage.run(chain(SESSION, start, [1] * WIDE, hidden, sampled))
        if start == end:
            stage.run(Compact(SESSION, end, ()))
    (own,) = BACKEND.footprints(name, [span], ON_CPU)
    predicted = BACKEND.runtime_bytes + own.weights + own.results + SLOTS * (own.slot + own.scores)
    # Not ``backend.memory_child``, which imports torch.
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {"peak": 1024 * int(status["VmHWM"].split()[0]), "predicted": predicted}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201
