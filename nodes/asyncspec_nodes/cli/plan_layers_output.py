"""What ``asyncspec plan layers`` prints."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from asyncspec_nodes.cluster.placement import ENOUGH, GIB

if TYPE_CHECKING:
    from asyncspec_nodes.cli.plan_layers import LayersPlan


def as_dict(plan: LayersPlan) -> dict[str, Any]:
    """The JSON object."""
    target, placement = plan.target, plan.placement
    return {
        "stages": [
            {
                "rank": rank,
                "device": stage.device.name,
                "layers": stage.layers,
                "weights_bytes": target.weights(stage.layers),
                "cache_bytes": target.cache(stage.layers),
                "runtime_bytes": target.other(stage.layers),
                "memory_bytes": stage.memory,
                "device_bytes": stage.device.memory,
                "pass_ms": 1000 * stage.seconds,
            }
            for rank, stage in enumerate(placement.stages, start=1)
        ],
        "left_out": _left_out(plan),
        "link_ms": 1000 * placement.link_seconds,
        "tokens_per_second": {
            "plain": plan.prediction.plain,
            plan.policy: plan.prediction.policy,
        },
        "draft": {"top": plan.draft.top, "level_ms": 1000 * plan.draft.level_seconds},
        "context": target.slots,
    }


def table(plan: LayersPlan) -> str:
    """The same for readers."""
    target, placement = plan.target, plan.placement
    found = Table("stage", "device", "layers", box=None, pad_edge=False)
    for head in ("weights", "cache", "runtime", "GiB", "of", "pass ms"):
        found.add_column(head, justify="right")
    for rank, stage in enumerate(placement.stages, start=1):
        span = stage.layers
        parts = (target.weights(span), target.cache(span), target.other(span), stage.memory)
        there = stage.device.memory
        found.add_row(
            *(f"V{rank}", stage.device.name, f"{span[0]}-{span[1] - 1}"),
            *(f"{size / GIB:.2f}" for size in parts),
            f"{there / GIB:.2f}" if there < ENOUGH else "",
            f"{1000 * stage.seconds:.2f}",
        )
    text = StringIO()
    Console(file=text, width=120).print(found)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    if left := _left_out(plan):
        lines.append(f"left out: {', '.join(left)}")
    speed = plan.prediction
    lines.append(
        f"predicted: {speed.plain:.1f} tokens/s plain, {speed.policy:.1f} with {plan.policy} "
        f"(a draft whose first candidate is right in {plan.draft.top:.0%}, "
        f"{1000 * plan.draft.level_seconds:.2f} ms a level)"
    )
    return "\n".join(lines) + "\n"


def _left_out(plan: LayersPlan) -> list[str]:
    used = {stage.device.name for stage in plan.placement.stages}
    return [device.name for device in plan.devices.devices if device.name not in used]
