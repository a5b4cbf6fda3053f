"""``python tools/mutants``: whether a test fails for every mistake in a safety-critical line.

Each mutant of the catalogue replaces a line in a copy of the packages, where the test that it names
must fail. Exit code 1 where one survives, or does not fit the sources any more.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(ROOT)

import msgspec  # noqa: E402

from asyncspec_nodes.console.arguments import Parser, Version  # noqa: E402
from tools.mutants.catalogue import MUTANTS  # noqa: E402
from tools.mutants.gate import Failing, Gate, Result  # noqa: E402
from tools.mutants.mutant import Mutant  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all are killed, 1 some are not, 2 a user's mistake."""
    parser = Parser("mutants", description=__doc__)
    parser.add_argument("--version", action=Version)
    parser.add_argument("--only", metavar="NAME", help="one mutant, or a pattern such as 'floor-*'")
    parser.add_argument("--jobs", type=int, default=_cores(), help="mutants at a time")
    parser.add_argument("--json", action="store_true", help="results on stdout, nothing else")
    options = parser.parse_args(argv)
    mutants = [one for one in MUTANTS if fnmatchcase(one.name, options.only or "*")]
    if not mutants:
        sys.stderr.write(f"mutants: there is no mutant {options.only}\n")
        return 2
    if options.jobs < 1:
        sys.stderr.write(f"mutants: --jobs {options.jobs} is less than 1\n")
        return 2
    try:
        results = _run(mutants, options.jobs, quiet=options.json)
    except Failing as error:
        sys.stderr.write(f"mutants: {error}\n")
        return 1
    if options.json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    else:
        sys.stdout.write(_summary(results))
    return int(any(result.outcome != "killed" for result in results))


def _run(mutants: Sequence[Mutant], jobs: int, *, quiet: bool) -> list[Result]:
    def tell(result: Result) -> None:
        if not quiet:
            sys.stdout.write(_line(result))
            sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        return Gate(ROOT, Path(scratch).resolve(), jobs=jobs).run(mutants, tell)


def _line(result: Result) -> str:
    text = f"{result.outcome:9}{result.seconds:5.1f} s  {result.name}"
    if result.outcome == "killed":
        return text + "\n"
    return f"{text}\n    {result.place} {result.test}\n    {result.detail}\n"


def _summary(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    each = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"{len(results)} mutants: {each}\n"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
