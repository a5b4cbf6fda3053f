"""Placements of a real target: its costs from configurations alone, and ``layers = "auto"``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from msgspec.structs import replace

from asyncspec.backend.base import CPU, DType, Footprint, ModelInfo, StageOptions
from asyncspec.backend.registry import DEFAULT, LLAMA, backend_name, backend_of
from asyncspec.core.errors import UserError
from asyncspec.placement.model import (
    FREE,
    Constraints,
    Device,
    LayerCost,
    Network,
    Placement,
    Span,
    TargetCost,
)
from asyncspec.placement.rate import Rate, throughput_rate
from asyncspec.policy.base import max_tree_nodes
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cluster.config import AUTO, Config, NodeTable
from asyncspec_nodes.console.bounds import BYTES_PER_MEGABIT, GB, GIB

MAX_CONTEXT = 8192
"""Tokens of a planned cache without --context."""

DRAFT_SHARE = 1 / 30
"""A draft level takes this share of a pass over the whole target on a mean device."""

OVERHEAD = {DEFAULT: (0.0003, 0.0002)}
"""Seconds of a layer, and of a pass, besides reading weights, where they are known. Measured with
the bundled target on a Zen 4 core, exact mode: .37 ms a layer, of which .06 read weights, and .19
(docs/results/placement.md)."""

WEIGHTLESS = 1 << 24
"""Work of a toy target's layers, in bytes: they have no weights, but take some time."""

ENOUGH = 1 << 60
"""Bytes of a device whose memory is not stated."""

BY_OPTION = (
    "add a device or memory, or choose fewer --sessions, a smaller --context, --quantize or target"
)
BY_KEY = (
    "add a [[node]] or memory_gib, or choose fewer [limits] sessions, [target] quantize or a "
    "smaller target"
)
"""What to do where a target does not fit, by who asks."""


PLANNED_STAGES = 4
"""For the size of trees where the number of stages is still open."""


def cluster_cost(
    config: Config, policy: str, stages: int = PLANNED_STAGES, context: int | None = None
) -> TargetCost:
    """``target_cost`` of a cluster's target with the caches of all its sessions, for ``context``
    tokens and the largest trees that ``policy`` grows for so many stages."""
    ranks = [node.rank for node in config.node if node.rank]
    # Any stage may come to any of the devices that they name.
    named = dict.fromkeys(map(config.stage_options_of, ranks))
    options, *others = named or (config.stage_options,)
    cost = target_cost(config.target.path, options, context, config.limits.sessions, others)
    return replace(cost, slots=cost.slots + tree_slots(config, policy, stages))


def tree_slots(config: Config, policy: str, stages: int = PLANNED_STAGES) -> int:
    """Slots of ``cluster_cost`` that are trees'."""
    return config.limits.sessions * max_tree_nodes(POLICIES[policy], stages)


def target_cost(
    name: str,
    options: StageOptions,
    slots: int | None = None,
    sessions: int = 1,
    others: Sequence[StageOptions] = (),
) -> TargetCost:
    """The target as stages hold it, with caches of so many sessions for so many slots in all
    (default: of its context, at most ``MAX_CONTEXT``). ``others``: of stages that compute
    otherwise; sizes are the largest. Raises ``UserError``; no weights are downloaded."""
    backend = backend_of(name)
    info = backend.inspect(name)
    every = [*combinations(range(info.layers + 1), 2)]
    spans = [*((layer, layer + 1) for layer in range(info.layers)), (0, info.layers)]
    footprints = [backend.footprints(name, spans, one) for one in (options, *others)]
    *single, whole = map(_largest, zip(*footprints, strict=True))
    layers = tuple(
        LayerCost(
            one.weights,
            one.weights - one.embedding or WEIGHTLESS,
            one.slot,
            one.results,
            one.session,
        )
        for one in single
    )
    layer_seconds, pass_seconds = OVERHEAD.get(backend_name(name), (0.0, 0.0))
    return TargetCost(
        layers,
        whole=whole.weights,
        runtime=backend.runtime_bytes,
        scores=max(one.scores for one in single),
        row_bytes=info.hidden_size * _item_bytes(name, info, options.dtype),
        slots=min(info.context_length, MAX_CONTEXT) if slots is None else slots,
        sessions=sessions,
        layer_seconds=layer_seconds,
        pass_seconds=pass_seconds,
        refused=backend.refused_spans(name, every),
    )


def _largest(footprints: Sequence[Footprint]) -> Footprint:
    """The largest sizes of footprints of the same layers."""
    largest = max(footprints, key=lambda one: one.weights)
    fields = ("slot", "scores", "results", "session")
    return replace(largest, **{key: max(getattr(one, key) for one in footprints) for key in fields})


def check_spans(name: str, spans: Sequence[Span]) -> None:
    """Raises ``UserError`` where layers of a target cannot be a stage."""
    for reason in backend_of(name).refused_spans(name, spans).values():
        raise UserError(reason)


def _item_bytes(name: str, info: ModelInfo, dtype: DType) -> int:
    wanted = info.dtype if dtype == "auto" else dtype
    # float16 is computed where it is asked for.
    two_bytes = ("bf16", "bfloat16", *(("fp16", "float16") if dtype != "auto" else ()))
    return 2 if wanted in two_bytes and backend_name(name) != LLAMA else 4


def draft_level_seconds(target: TargetCost, devices: Sequence[Device]) -> float:
    """Default without measured or given seconds of a draft level."""
    mean = sum(device.speed for device in devices) / len(devices)
    return DRAFT_SHARE * target.seconds((0, len(target.layers)), mean)


def best_placement(
    target: TargetCost,
    devices: Sequence[Device],
    network: Network,
    rate: Rate,
    constraints: Constraints = FREE,
    advice: str = BY_OPTION,
) -> Placement:
    """Raises ``UserError`` with ``advice`` where there is none."""
    # It imports numpy, which most commands and nodes can do without.
    from asyncspec.placement.search import place

    placement = place(target, devices, network, rate, constraints)
    if placement is None:
        raise UserError(why_not(target, devices, constraints, advice))
    return placement


def keeps_order(target: TargetCost, devices: Sequence[Device], network: Network) -> bool:
    """Whether ``best_placement`` leaves devices in their given order, as too many are different."""
    from asyncspec.placement import search

    return search.keeps_order(target, devices, network)


def why_not(
    target: TargetCost,
    devices: Sequence[Device],
    constraints: Constraints,
    advice: str = BY_OPTION,
) -> str:
    """Why a target has no placement on devices, and ``advice`` where they are too small."""
    layers, stages = len(target.layers), constraints.stages
    if stages is not None and stages > min(len(devices), layers):
        return (
            f"{stages} stages need as many devices and layers, and there are {len(devices)} "
            f"devices and {layers} layers"
        )
    reason = next(iter(target.refused.values()), "")
    if not target.can_be_cut(stages):
        count = "stages" if stages is None else f"{stages} stages"
        return f"the target cannot be cut into {count}: {reason}"
    if stages == len(devices) and (short := _too_small(target, devices, constraints)):
        device, span = short
        return (
            f"{device.name} is too small for any stage: layers {span[0]} to {span[1] - 1} take "
            f"{target.memory(span) / GIB:.2f} GiB with cache and process, and it has "
            f"{device.memory / GIB:.2f} GiB; {advice}"
        )
    needed = target.weights((0, layers)) + target.cache((0, layers))
    each = target.other((0, 0))
    stated = [device.memory for device in devices if device.memory < ENOUGH]
    whose = "devices" if len(stated) == len(devices) else "devices whose memory is stated"
    besides = f"; not every cut is possible: {reason}" if reason else ""
    return (
        f"the target does not fit: weights and cache take {needed / GIB:.2f} GiB and every stage's "
        f"process {each / GIB:.2f} GiB more, and the {whose} have {sum(stated) / GIB:.2f} GiB; "
        f"{advice}{besides}"
    )


def _too_small(
    target: TargetCost, devices: Sequence[Device], constraints: Constraints
) -> tuple[Device, Span] | None:
    """The first device, each of which holds a stage, that has no memory for any; and the layers
    that take least there."""
    layers, last = len(target.layers), len(devices) - 1
    possible = [span for span in combinations(range(layers + 1), 2) if span not in target.refused]
    for number, device in enumerate(devices):
        spans = possible
        if constraints.ordered:
            spans = [
                (first, end)
                for first, end in possible
                # Each of the others has a layer, before these or behind them.
                if number <= first and last - number <= layers - end
                if (first == 0) == (number == 0) and (end == layers) == (number == last)
            ]
        least = min(spans, key=target.memory, default=None)
        if least is not None and target.memory(least) > device.memory:
            return device, least
    return None


def with_layers(config: Config) -> Config:
    """A cluster file's configuration with ranges in place of ``layers = "auto"``: every node finds
    the same. Raises ``UserError``."""
    if not any(node.layers == AUTO for node in config.node):
        return config
    stages = sorted((node for node in config.node if node.rank), key=lambda node: node.rank)
    placement = best_placement(
        cluster_cost(_on_any_machine(config), config.draft.policy, len(stages)),
        devices_of(stages),
        Network(draft=draft_of(config)),
        throughput_rate(config.limits.sessions),
        Constraints(len(stages), ordered=True),
        BY_KEY,
    )
    spans = {node.rank: one.layers for node, one in zip(stages, placement.stages, strict=True)}
    placed = [replace(node, layers=spans[node.rank]) if node.rank else node for node in config.node]
    return replace(config, node=tuple(placed))


def _on_any_machine(config: Config) -> Config:
    """With the CPU for the device "auto", which is another one on each machine."""
    target, nodes = config.target, config.node
    if target.device == AUTO:
        target = replace(target, device=CPU)
    nodes = tuple(replace(one, device=CPU) if one.device == AUTO else one for one in nodes)
    return replace(config, target=target, node=nodes)


def devices_of(stages: Sequence[NodeTable]) -> list[Device]:
    """What a cluster file says of its stages' machines; nodes of one host share its memory. Where
    no speed is stated all are equally fast, and how fast means nothing."""
    speeds = [node.gb_per_second for node in stages if node.gb_per_second]
    mean = sum(speeds) / len(speeds) if speeds else 1.0
    hosts = [node.host for node in stages]
    return [
        Device(
            f"rank {node.rank}",
            int(node.memory_gib * GIB / hosts.count(node.host)) if node.memory_gib else ENOUGH,
            (node.gb_per_second or mean) * GB,
            (node.latency_ms or 0.0) / 1000,
            (node.mbit or 0.0) * BYTES_PER_MEGABIT,
        )
        for node in stages
    ]


def draft_of(config: Config) -> Device:
    """The draft node's connection."""
    node = config.find(0)
    return Device("draft", 0, 1.0, (getattr(node, "latency_ms", None) or 0.0) / 1000)
