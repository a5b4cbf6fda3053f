"""``python tools/mutants``: how many small mistakes in safety-critical modules a test notices.

A sample of mistakes, the same for the same seed, is tried against the tests of its area. Exit code
1 where fewer than the wanted share are noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(ROOT)

import msgspec  # noqa: E402

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError  # noqa: E402
from asyncspec_nodes.console.arguments import Parser, Version  # noqa: E402
from asyncspec_nodes.console.bounds import COUNT, Bounds  # noqa: E402
from tools.mutants.areas import AREAS, PACKAGES  # noqa: E402
from tools.mutants.forks import VARIABLE, Plan, Result, Task  # noqa: E402
from tools.mutants.operators import Mutant, mutants  # noqa: E402

_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""What the tests need. Others that happen to be installed take half a second to import."""


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 enough are killed, 1 too few are, 2 a user's mistake."""
    parser = Parser("mutants", description=__doc__)
    parser.add_argument("--version", action=Version)
    parser.add_argument("--only", metavar="AREA,...", help=f"of {', '.join(AREAS)}")
    parser.add_argument("--count", type=int, default=20, help="mutants of each area (20)")
    parser.add_argument("--seed", type=int, default=1, help="another sample (1)")
    parser.add_argument(
        "--least", type=float, default=0.8, help="share to be killed (0.8: some are equivalent)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--json", action="store_true", help="results on stdout, nothing else")
    options = parser.parse_args(argv)
    try:
        for name, bounds in (("count", COUNT), ("jobs", COUNT), ("least", Bounds(0.0, 1.0))):
            bounds.check(f"--{name}", getattr(options, name))
        names = options.only.split(",") if options.only else list(AREAS)
        if unknown := [name for name in names if name not in AREAS]:
            raise UserError(f"--only: there is no area {unknown[0]}; there are {', '.join(AREAS)}")
        tasks = [
            Task(name, mutant, AREAS[name].tests)
            for name in names
            for mutant in sample(ROOT, AREAS[name].modules, options.count, options.seed)
        ]
        results = tried(ROOT, PACKAGES, tasks, options.jobs)
    except AsyncSpecError as error:
        sys.stderr.write(f"mutants: {error}\n")
        return 2 if isinstance(error, UserError) else 1
    if options.json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(results), indent=1) + "\n")
    else:
        for name in names:
            sys.stdout.write(_lines(name, [each for each in results if each.area == name]))
        sys.stdout.write(f"killed: {_share(results)}, wanted {options.least:.0%}\n")
    return int(_killed(results) < options.least * len(results))


def sample(root: Path, modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Some mistakes of these modules. What changes elsewhere in them changes few of the sample."""
    every = [
        mutant
        for module in modules
        for mutant in mutants(module, (root / module).read_text(encoding="utf-8"))
    ]
    occurrences: Counter[tuple[str, ...]] = Counter()
    ranked = []
    for mutant in every:
        text = "\n".join((str(seed), *mutant.identity, str(occurrences[mutant.identity])))
        occurrences[mutant.identity] += 1
        ranked.append((hashlib.sha256(text.encode()).digest(), mutant))
    ranked.sort(key=lambda pair: pair[0])
    return [mutant for _, mutant in ranked[:count]]


def tried(root: Path, packages: tuple[str, ...], tasks: Sequence[Task], jobs: int) -> list[Result]:
    """What becomes of mutants under their tests. Raises ``ClusterError`` where those fail without
    any mutant."""
    tests = sorted({file for task in tasks for file in task.tests})
    paths = [str(root / Path(package).parent) for package in packages]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # The same examples every time, and any failing one will do.
        "HYPOTHESIS_PROFILE": "mutants",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    plugins = [word for name in (*_PLUGINS, "tools.mutants.forks") for word in ("-p", name)]
    options = ["-q", "--tb=short", "--color=no", "-m", "not slow", "-p", "no:cacheprovider"]
    path = ["-o", "pythonpath=" + " ".join([*paths, "tests"])]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        file = Path(folder) / "plan.json"
        file.write_bytes(msgspec.json.encode(Plan(str(root), packages, tuple(tasks), jobs)))
        command = [sys.executable, "-m", "pytest", *options, *plugins, *path, *tests]
        ended = subprocess.run(
            command,
            cwd=root,
            env=environment | {VARIABLE: str(file)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise ClusterError(f"the tests cannot be run:\n{ended.stdout}{ended.stderr}".strip())
        lines = file.with_suffix(".out").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Result) for line in lines]


def _killed(results: Sequence[Result]) -> int:
    return sum(result.outcome == "killed" for result in results)


def _share(results: Sequence[Result]) -> str:
    return f"{_killed(results)} of {len(results)} ({_killed(results) / len(results):.0%})"


def _lines(name: str, results: Sequence[Result]) -> str:
    """How many of an area were killed, and each that was not."""
    lines = [f"{name}: {_share(results)}"]
    for result in results:
        if result.outcome != "killed":
            mutant = result.mutant
            place = f"{mutant.file}:{mutant.line} {mutant.function}"
            lines.append(f"    {result.outcome}: {place}: {mutant.change} ({result.detail})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
