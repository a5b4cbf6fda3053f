"""``python tools/check_device``: options, what is checked, and the report."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from asyncspec.backend.llama.devices import find, gpus
from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_nodes.console.arguments import Version
from tools.check_device.convert import convert
from tools.check_device.measure import POLICIES, Measured, measure

KINDS = ("F16", "Q8_0", "Q4_0")
"""Types that the bundled target is converted to."""

DEVICE_VARIABLE = "ASYNCSPEC_TEST_DEVICE"
"""Of ``tests/backend/test_llama.py``."""

TESTS = "tests/backend/test_llama.py"
ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="check_device", description=__doc__)
    add = made.add_argument
    add("--version", action=Version)
    add("--device", action="append", metavar="NAME", help="default: the CPU and every GPU")
    add("--target", type=Path, metavar="GGUF", help="a model besides the bundled one")
    add("--draft", type=Path, metavar="GGUF", help="its draft model; default: ngram")
    add("--no-tests", action="store_true", help="leave the conformance tests out")
    add("--llama-cpp", type=Path, metavar="DIR", help="also run the peers bench with it")
    add("--out", type=Path, metavar="FILE", help="write the report there, too")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 where everything that was tried works."""
    options = parser().parse_args(argv)
    try:
        text, good = report(options)
        print(text)
        if options.out is not None:
            options.out.write_text(text + "\n", encoding="utf-8")
    except (AsyncSpecError, OSError) as error:
        print(f"check_device: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


def report(options: argparse.Namespace) -> tuple[str, bool]:
    """The report, and whether everything works. Raises ``UserError``."""
    devices = options.device or ["cpu", *(device.name for device in gpus())]
    for device in devices:
        find(device)
    lines = [_machine()]
    with tempfile.TemporaryDirectory(prefix="asyncspec-device-") as name:
        folder = Path(name)
        draft = convert(BUNDLED_DRAFT, folder / "draft-F16.gguf")
        models = [
            (convert(BUNDLED_TARGET, folder / f"demo-{kind}.gguf", kind), draft) for kind in KINDS
        ]
        if options.target is not None:
            models.append((options.target.absolute(), options.draft and options.draft.absolute()))
        found = [measure(*model, device) for device in devices for model in models]
    lines.append(table(found))
    good = not any(one.problems or not all(one.equal.values()) for one in found)
    if not options.no_tests:
        for device in devices:
            passed, said = _command(
                ["-m", "pytest", "-q", "--no-header", TESTS], {DEVICE_VARIABLE: device}
            )
            good = good and passed
            lines.append(f"conformance on {device}: {said.splitlines()[-1]}")
    if options.llama_cpp is not None:
        passed, said = _command(["tools/bench", "peers", "--llama-cpp", str(options.llama_cpp)], {})
        good = good and passed
        lines.append(said)
    return "\n\n".join(lines), good


def _machine() -> str:
    names = [f"{device.name} ({device.description})" for device in gpus()]
    return (
        f"llama-cpp-python {version('llama-cpp-python')}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores; "
        f"GPUs: {', '.join(names) or 'none'}"
    )


def table(found: Sequence[Measured]) -> str:
    """A row for each model and device, as Markdown; then what failed."""
    rows = sorted({rows for one in found for rows in one.pass_ms})
    heads = ["model", "device", "guarantee", *(f"pass of {count}, ms" for count in rows)]
    heads += ["Python, ms", *(f"{policy}, tokens/s" for policy in POLICIES), "texts equal"]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for one in found:
        cells = [one.model, one.device, one.guarantee or "-"]
        cells += [f"{one.pass_ms[count]:.2f}" if count in one.pass_ms else "-" for count in rows]
        cells.append(f"{one.python_ms:.2f}")
        speeds = one.tokens_per_second
        cells += [f"{speeds[policy]:.1f}" if policy in speeds else "-" for policy in POLICIES]
        cells.append("yes" if one.equal and all(one.equal.values()) else "no")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"- {one.model} on {one.device}: {why}" for one in found for why in one.problems]
    return "\n".join(lines)


def _command(argv: list[str], environment: dict[str, str]) -> tuple[bool, str]:
    """Whether a program of Python's succeeds, and what it prints."""
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    text = done.stdout.strip() or done.stderr.strip() or "no output"
    return done.returncode == 0, text
