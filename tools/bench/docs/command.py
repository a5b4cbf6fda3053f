"""``python tools/bench docs``: write the generated parts of README.md and ``docs/`` anew.

References come from the parsers and structs, tables of results from ``docs/results/*.json``, lanes
from runs on the virtual clock, and the list of error messages from the packages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from asyncspec.core.errors import UserError
from tools.bench.docs import cli, cluster_file, errors, lanes, metrics, pairs, policies, results
from tools.bench.docs.blocks import Generator, fill

ROOT = Path(__file__).resolve().parents[3]

MESSAGES = Path("docs/messages.md")

GENERATORS: Mapping[str, Generator] = {
    "cli": cli.reference,
    "cluster-file": cluster_file.reference,
    "lanes": lanes.reference,
    "metrics": metrics.reference,
    "pairs": pairs.reference,
    "policies": policies.reference,
    "results": results.reference,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench docs``."""
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 for a difference"
    )


def run(options: argparse.Namespace) -> int:
    """Exit code: 1 where ``--check`` finds a page that differs."""
    changed = pages()
    for path, text in changed.items():
        if options.check:
            sys.stderr.write(f"bench: {path} differs; run python tools/bench docs\n")
        else:
            (ROOT / path).write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path}\n")
    return 1 if changed and options.check else 0


def pages() -> dict[Path, str]:
    """The pages that differ from what their generators make now, with the text they should have.
    Raises ``UserError`` that names the page."""
    changed: dict[Path, str] = {}
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        name = path.relative_to(ROOT)
        before = path.read_text(encoding="utf-8")
        try:
            after = fill(before, GENERATORS)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        if name == MESSAGES:
            after = errors.refresh(after, errors.templates())
        if after != before:
            changed[name] = after
    return changed
