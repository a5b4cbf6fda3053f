"""``python tools/bench dipsd-machines``: plans at run time for 4 to 64 users, on the real machines.

Draft nodes and stages are those of a cluster, the clock, devices and links are simulated: equal and
unequal users, jitter, text that turns easier or harder to guess, slow links, users who come and go.
Every text is held against the sequential decoder's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from asyncspec_nodes.console.bounds import COUNT, Bounds
from asyncspec_protocol.ids import MAX_DRAFTS
from tools.bench.dipsd.machines.cases import CASES
from tools.bench.dipsd.machines.measure import CHAIN, STAGES, TOKENS, USERS, VARIANTS, Ask, measure
from tools.bench.dipsd.machines.page import draw, page
from tools.bench.options import SEVERAL, check_numbers
from tools.bench.selection import chosen_parts, make_folder

MAX_STAGES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench dipsd-machines``."""
    cases, drafts = ", ".join(CASES), ", ".join(VARIANTS)
    parser.add_argument("--users", type=int, nargs="+", default=USERS, metavar="N")
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES, metavar="N")
    parser.add_argument("--only", metavar="CASE,CASE", help=f"of {cases}; default: all")
    parser.add_argument("--drafts", nargs="+", choices=[*VARIANTS], default=[CHAIN], help=drafts)
    parser.add_argument(
        "--max-new-tokens", type=int, default=TOKENS, metavar="N", help=f"a user ({TOKENS})"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--json", action="store_true", help="one object on stdout, nothing else")
    parser.add_argument("--out", type=Path, metavar="DIR", help="machines.md, .json and a picture")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_numbers(
        options,
        users=Bounds(1, MAX_DRAFTS),
        stages=Bounds(1, MAX_STAGES),
        max_new_tokens=SEVERAL,
        jobs=COUNT,
    )
    names = chosen_parts(options.only, CASES)
    if options.out is not None:
        make_folder(options.out)
    asks = [
        Ask(CASES[name], users, stages, variant, options.max_new_tokens)
        for users in options.users
        for stages in options.stages
        for name in names
        for variant in options.drafts
    ]
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("crowds", total=len(asks))
        found = measure(lambda: progress.advance(task), asks, options.jobs)
    text = json.dumps({"crowds": msgspec.to_builtins(found)}, indent=1)
    if options.out is not None:
        (options.out / "machines.json").write_text(text + "\n")
        (options.out / "machines.md").write_text(page(found) + "\n![](machines.png)\n")
        draw(found, options.out / "machines.png")
    print(text if options.json else page(found), end="\n" if options.json else "")
    return 0
