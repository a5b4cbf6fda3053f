"""``python tools/check_device``: options, what is checked, and the report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec.plugins.hf.kernels import device as torch_names
from asyncspec.plugins.llama.library import missing
from asyncspec_nodes.console.arguments import Parser, Version
from tools.bench.bits.shapes import PUBLISHED
from tools.bench.selection import check_file, chosen_parts
from tools.check_device import torch_devices

DEVICE_VARIABLE = "ASYNCSPEC_TEST_DEVICE"
"""Of the tests below."""

TORCH_TESTS, GGUF_TESTS = "tests/backend/test_device.py", "tests/backend/test_llama.py"
MODELS = "llama-3.2-1b,qwen3-4b"
ROOT = Path(__file__).resolve().parents[2]


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="check_device", description=__doc__)
    add = made.add_argument
    add("--version", action=Version)
    add("--device", action="append", metavar="NAME", help="default: the CPU and every GPU")
    add("--only", choices=("torch", "gguf"), help="checkpoints, or GGUF models; default: both")
    add("--models", default=MODELS, help=f"shapes of checkpoints; default: {MODELS}")
    add("--layers", type=int, default=4, help="of each shape (default: 4)")
    add("--target", type=Path, metavar="GGUF", help="a model besides the bundled one")
    add("--draft", type=Path, metavar="GGUF", help="its draft model; default: ngram")
    add("--no-tests", action="store_true", help="leave the conformance tests out")
    add("--llama-cpp", type=Path, metavar="DIR", help="also run the peers bench with it")
    add("--json", action="store_true", help="the report as JSON")
    add("--out", type=Path, metavar="FILE", help="write the report there, too")
    return made


class Report(Struct):
    """What was found on a machine."""

    machine: str
    # Texts, as they are printed; their figures.
    parts: list[str] = []
    figures: dict[str, Any] = {}
    good: bool = True

    def add(self, text: str, *, good: bool) -> None:
        self.parts.append(text)
        self.good = self.good and good


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 where everything that was tried works, 2 a user's mistake, 1 anything else."""
    options = parser().parse_args(argv)
    try:
        if options.out is not None:
            check_file("--out", options.out)
        found = report(options)
        text = "\n\n".join([found.machine, *found.parts])
        if options.json:
            text = json.dumps(msgspec.to_builtins(found, str_keys=True))
        print(text)
        if options.out is not None:
            options.out.write_text(text + "\n", encoding="utf-8")
    except (AsyncSpecError, OSError) as error:
        print(f"check_device: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0 if found.good else 1


def report(options: argparse.Namespace) -> Report:
    """Raises ``UserError``, for a device that no library has, too."""
    cores = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    found = Report(f"Python {platform.python_version()}, {cores}")
    models = chosen_parts(options.models, PUBLISHED, "--models")
    gguf = _wants_gguf(options)
    of_torch, of_llama = _devices(options, gguf=gguf)
    if of_torch:
        _torch(found, options, of_torch, models)
    if of_llama:
        _gguf(found, options, of_llama)
    if options.llama_cpp is not None:
        good, said = _command(["tools/bench", "peers", "--llama-cpp", str(options.llama_cpp)], {})
        found.add(said, good=good)
    return found


def _wants_gguf(options: argparse.Namespace) -> bool:
    """Whether llama.cpp's devices are checked: left out where it is not installed and no option is
    about it. Raises ``UserError``."""
    asked = options.target is not None or options.draft is not None
    if asked and options.only == "torch":
        raise UserError("--target and --draft are GGUF models; leave --only torch out")
    if options.draft is not None and options.target is None:
        raise UserError("--draft is the draft model of --target; give that, too")
    there = find_spec("llama_cpp") is not None
    if not there and (asked or options.only == "gguf"):
        raise missing()
    return there and options.only != "torch"


def _devices(options: argparse.Namespace, *, gguf: bool) -> tuple[list[str], list[str]]:
    """Those of torch and of llama.cpp that are to be checked. Raises ``UserError``."""
    of_torch = [] if options.only == "gguf" else options.device or ["cpu", *torch_names.names()]
    if not gguf:
        for name in of_torch:
            torch_names.find(name)
        return of_torch, []
    from asyncspec.plugins.llama.devices import find, gpus

    of_llama = options.device or ["cpu", *(device.name for device in gpus())]
    of_torch, without = _known(of_torch, torch_names.find)
    of_llama, lacking = _known(of_llama, find)
    for name, error in lacking.items():
        if name not in of_torch:
            raise error
    if options.only == "torch" and without:
        raise next(iter(without.values()))
    return of_torch, of_llama


def _known(names: Sequence[str], find: Any) -> tuple[list[str], dict[str, UserError]]:
    """Those that a library finds, and what it says of others."""
    known, others = [], {}
    for name in names:
        try:
            find(name)
            known.append(name)
        except UserError as error:
            others[name] = error
    return known, others


def _torch(
    found: Report, options: argparse.Namespace, devices: Sequence[str], models: Sequence[str]
) -> None:
    kinds = [
        one
        for device in devices
        for model in models
        for one in torch_devices.measure(model, options.layers, device)
    ]
    runs = [run for device in devices for run in torch_devices.run_clusters(device)]
    good = not any(one.problems for one in kinds) and all(run.good for run in runs)
    found.figures |= {"torch": kinds, "runs": runs}
    found.add(torch_devices.machine() + "\n\n" + torch_devices.table(kinds, runs), good=good)
    _tests(found, options, TORCH_TESTS, [name for name in devices if name != "cpu"])


def _gguf(found: Report, options: argparse.Namespace, devices: Sequence[str]) -> None:
    from tools.check_device import gguf_devices

    measured = gguf_devices.measure_all(devices, options.target, options.draft)
    good = all(one.good for one in measured)
    found.figures["gguf"] = measured
    found.add(gguf_devices.machine() + "\n\n" + gguf_devices.table(measured), good=good)
    _tests(found, options, GGUF_TESTS, devices)


def _tests(found: Report, options: argparse.Namespace, tests: str, devices: Sequence[str]) -> None:
    for device in () if options.no_tests else devices:
        good, said = _command(
            ["-m", "pytest", "-q", "--no-header", "-rs", tests], {DEVICE_VARIABLE: device}
        )
        found.add(f"conformance on {device} ({tests}): {said.splitlines()[-1]}", good=good)


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
