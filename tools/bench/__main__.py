"""``python tools/bench KIND``: measurements on real processes, as ratios within one run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from tools.bench import (  # noqa: E402
    coverage,
    explain,
    hybrid,
    policies,
    record_language,
    stage_time,
    tracing,
)
from tools.bench.report import command as report  # noqa: E402

KINDS = {
    "policies": (policies, "every policy on the same prompts"),
    "report": (report, "the papers' tables and figures"),
    "hybrid": (hybrid, "mixes of token sources next to the better of their parts"),
    "explain": (explain, "where a mix of token sources wins and loses, token by token"),
    "record-language": (record_language, "what a target writes and a draft guesses"),
    "coverage": (coverage, "how often the target's token is among a draft's k likeliest"),
    "stage-time": (stage_time, "a stage's pass by its rows"),
    "tracing": (tracing, "what recording a trace costs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark that was asked for."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, (module, text) in KINDS.items():
        module.add_arguments(kinds.add_parser(name, help=text, description=module.__doc__))
    options = parser.parse_args(argv)
    code: int = KINDS[options.kind][0].run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
