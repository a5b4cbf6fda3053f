"""GGUF models on llama.cpp's devices: the bundled ones in several types, or the user's."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from asyncspec.plugins.llama.devices import gpus
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from tools.check_device.convert import convert
from tools.check_device.measure import POLICIES, Measured, measure

KINDS = ("F16", "Q8_0", "Q4_0")
"""Types that the bundled target is converted to."""


def machine() -> str:
    """llama.cpp and what it finds."""
    names = [f"{device.name} ({device.description})" for device in gpus()]
    return f"llama-cpp-python {version('llama-cpp-python')}; GPUs: {', '.join(names) or 'none'}"


def measure_all(devices: Sequence[str], target: Path | None, draft: Path | None) -> list[Measured]:
    """``target``: a model besides the bundled one."""
    with tempfile.TemporaryDirectory(prefix="asyncspec-device-") as name:
        folder = Path(name)
        small = convert(BUNDLED_DRAFT, folder / "draft-F16.gguf")
        models: list[tuple[Path, Path | None]] = [
            (convert(BUNDLED_TARGET, folder / f"demo-{kind}.gguf", kind), small) for kind in KINDS
        ]
        if target is not None:
            models.append((target.absolute(), draft and draft.absolute()))
        return [measure(*model, device) for device in devices for model in models]


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
