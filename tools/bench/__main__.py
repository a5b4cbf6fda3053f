"""``python tools/bench KIND``: measurements on real processes, as ratios within one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from asyncspec.backend.threads import set_thread_defaults  # noqa: E402

# Before torch is imported by any of the benchmarks.
set_thread_defaults()

from asyncspec.core.errors import (  # noqa: E402
    AsyncSpecError,
    UserError,
)
from asyncspec_nodes.console.arguments import Parser, Version  # noqa: E402
from tools.bench import (  # noqa: E402
    enlarge,
    grid,
    learning,
    padded,
    placement,
    real,
    record_language,
    recording,
)
from tools.bench.bits import command as bits  # noqa: E402
from tools.bench.dipsd import command as dipsd  # noqa: E402
from tools.bench.dipsd import run_time as dipsd_run  # noqa: E402
from tools.bench.docs import command as docs  # noqa: E402
from tools.bench.faults import command as faults  # noqa: E402
from tools.bench.first_token import command as first_token  # noqa: E402
from tools.bench.limits import command as limits  # noqa: E402
from tools.bench.peers import command as peers  # noqa: E402
from tools.bench.report import command as report  # noqa: E402
from tools.bench.serving import command as serving  # noqa: E402
from tools.bench.serving import whole_machine  # noqa: E402
from tools.bench.tensor_parallel import command as tensor_parallel  # noqa: E402

KINDS = {
    "grid": (grid, "policy flow next to the fixed ones, in simulated clusters of many kinds"),
    "report": (report, "the papers' tables and figures"),
    "dipsd": (dipsd, "DiP-SD's Figures 3 and 4"),
    "dipsd-run": (dipsd_run, "a DiP-SD plan at run time next to greedy batching"),
    "record-language": (record_language, "what a target writes and a draft guesses"),
    "limits": (limits, "how near the pipeline runs to its own limit"),
    "peers": (peers, "our policies, Hugging Face generate and other engines, interleaved"),
    "tensor-parallel": (
        tensor_parallel,
        "Megatron-LM's and Galaxy's kind, on links of several rates",
    ),
    "serving": (serving, "what a pipeline owes many users at a time"),
    "vllm": (whole_machine, "vLLM and ours on the same cores, several requests at a time"),
    "prompts": (
        first_token,
        "seconds to the first token of long prompts, next to the engine alone",
    ),
    "faults": (faults, "seconds from a fault of a node to the next token"),
    "real": (real, "a real model's pipeline with each policy and token source"),
    "learn": (learning, "what a head learns while its cluster serves, and what that costs"),
    "bits": (bits, "whether trees have the bits of sequences on this CPU"),
    "enlarge": (enlarge, "a checkpoint made larger that says the same"),
    "padded": (padded, "policies on six emulated clusters, next to the simulator"),
    "placement": (placement, "tokens/s that asyncspec plan layers predicts, and measured ones"),
    "docs": (docs, "the generated parts of the documentation, and whether they are up to date"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark that was asked for. Exit code: 0 done, 2 a user's mistake, 1 anything
    else."""
    parser = Parser(prog="bench", description=__doc__)
    parser.add_argument("--version", action=Version)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for name, (module, text) in KINDS.items():
        kind = kinds.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(kind)
        kind.add_argument(
            "--record",
            metavar="FILE#TABLE[:KEY]",
            help="write what --json prints to docs/results/FILE.json, as that table",
        )
    try:
        options = parser.parse_args(argv)
        code: int = _run(options, sys.argv[1:] if argv is None else argv)
    except AsyncSpecError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        sys.stderr.write("bench: interrupted\n")
        return 1
    return code


def _run(options: argparse.Namespace, argv: list[str]) -> int:
    measure: Callable[[], int] = partial(KINDS[options.kind][0].run, options)
    if options.record is None:
        return measure()
    if not hasattr(options, "json"):
        raise UserError(f"--record: {options.kind} prints no JSON")
    options.json = True
    return recording.record(options.record, argv, measure)


if __name__ == "__main__":
    sys.exit(main())
