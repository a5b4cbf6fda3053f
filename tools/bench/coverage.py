"""``python tools/bench coverage``: how often the target's token is among the draft's k likeliest.

SpecPipe's Figure 7 and PipeDec's Figure 3, for any pair: of a language recorded with
``bench record-language`` (every place of real texts, teacher-forced).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncspec.sim.recorded import RecordedText, ranks, read_language

RANKS = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench coverage``."""
    parser.add_argument("file", type=Path, help="of bench record-language")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Print the hit rate by k."""
    texts = read_language(options.file).texts
    found = coverage(texts)
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("| k | hit rate |\n| ---: | ---: |\n")
        sys.stdout.writelines(f"| {k} | {rate:.3f} |\n" for k, rate in found.items())
    return 0


def coverage(texts: Sequence[RecordedText]) -> dict[int, float]:
    """Share of all places by k, as far as candidates were kept at each of them."""
    found = list(ranks(texts))
    if not found:
        return {}
    kept = max(len(candidates) for text in texts for candidates in text.candidates)
    return {
        k: sum(rank is not None and rank < k for rank in found) / len(found)
        for k in RANKS
        if k <= kept
    }
