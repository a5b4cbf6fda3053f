"""What a placement is decided on: a model's layers, devices, links; and what one is worth.

A pass within the plateau takes as long as reading its weights, bytes over the device's speed, and
some time for each layer and for itself. The embedding is looked up, not read; the head is read by
the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

Span = tuple[int, int]

HANDLING_SECONDS = 0.001
"""Time that the processes at both ends of a link take for a message, beside its latency. Measured:
.8 to 2.2 ms where all processes share two busy cores (docs/results/placement.md)."""


def span_text(span: Span) -> str:
    """Layers [first, end), for people."""
    first, end = span
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"


class LayerCost(Struct, frozen=True):
    """Bytes of a layer; the first one with the embedding, the last one with norm and head."""

    # Weights that the device holds, and those that a pass reads.
    weights: int
    work: int
    # Cache per token or tree node.
    slot: int = 0
    # Results of passes.
    results: int = 0
    # Cache per session, whatever its length: the state of recurrent layers.
    session: int = 0


class TargetCost(Struct, frozen=True):
    """The target as stages hold it, in bytes."""

    layers: tuple[LayerCost, ...]
    # Weights of a single stage that holds all: a tied matrix is there once. 0: their sum.
    whole: int = 0
    # A stage's process without weights and cache, and a pass per slot that it sees.
    runtime: int = 0
    scores: int = 0
    # A row of hidden states on a link.
    row_bytes: int = 0
    # Slots of all caches: tokens of the sessions at a time, and their trees.
    slots: int = 0
    # Upper bound on sessions at a time.
    sessions: int = 1
    # Seconds of a layer, and of a pass, that no reading of weights explains: starting products.
    layer_seconds: float = 0.0
    pass_seconds: float = 0.0
    # Layers [first, end) that cannot be a stage, each with the reason.
    refused: Mapping[Span, str] = {}

    def can_be_cut(self, stages: int | None) -> bool:
        """Whether so many stages (None: any number) can hold all layers, whatever they take."""
        layers = len(self.layers)
        ends = {0}
        for count in range(1, layers + 1):
            steps = ((first, end) for first in ends for end in range(first + 1, layers + 1))
            ends = {span[1] for span in steps if span not in self.refused}
            if layers in ends and stages in (None, count):
                return True
        return False

    def weights(self, span: Span) -> int:
        """Bytes of the weights of layers [first, end), with embedding and head where they are among
        them."""
        if self.whole and span == (0, len(self.layers)):
            return self.whole
        return sum(layer.weights for layer in self.layers[slice(*span)])

    def cache(self, span: Span) -> int:
        """Bytes of the cache: keys and values of all slots, and recurrent states of all
        sessions."""
        return sum(map(self.layer_cache, self.layers[slice(*span)]))

    def layer_cache(self, layer: LayerCost) -> int:
        """Bytes of one layer's cache."""
        return self.slots * layer.slot + self.sessions * layer.session

    def other(self, span: Span) -> int:
        """Bytes that a stage's process takes besides weights and cache."""
        results = sum(layer.results for layer in self.layers[slice(*span)])
        return self.runtime + self.slots * self.scores + results

    def memory(self, span: Span) -> int:
        """Bytes that a stage with layers [first, end) takes in all."""
        return self.weights(span) + self.cache(span) + self.other(span)

    def work(self, span: Span) -> int:
        """Bytes of weights that a pass reads."""
        return sum(layer.work for layer in self.layers[slice(*span)])

    def overhead(self, span: Span) -> float:
        """Seconds of a pass that no reading of weights explains."""
        return self.pass_seconds + self.layer_seconds * (span[1] - span[0])

    def seconds(self, span: Span, speed: float) -> float:
        """Seconds of a pass on a device that reads ``speed`` bytes a second."""
        return self.work(span) / speed + self.overhead(span)

    def speed(self, span: Span, seconds: float) -> float:
        """Bytes a second that a device reads on which a pass takes ``seconds``, of which at least a
        tenth is reading."""
        return self.work(span) / max(seconds - self.overhead(span), seconds / 10)


class Device(Struct, frozen=True):
    """A machine, or the part of one, that can hold a stage."""

    name: str
    # Bytes that a stage may take.
    memory: int
    # Bytes of weights that a pass reads in a second.
    speed: float
    # One-way latency of its connection in seconds, and bytes a second; 0: no limit.
    latency: float = 0.0
    bandwidth: float = 0.0
    # Its kind: layers that move to another one may round differently. Empty: not known.
    processor: str = ""


class Connection(Struct, frozen=True):
    """Between two devices."""

    # Seconds one way; bytes a second, 0: no limit.
    latency: float
    bandwidth: float = 0.0

    def row_seconds(self, row_bytes: int) -> float:
        """For so long a row keeps the link busy."""
        return row_bytes / self.bandwidth if self.bandwidth else 0.0


class Network(Struct, frozen=True):
    """How devices and the draft node are connected."""

    # Measured pairs, in either order of names; others have the worse of both devices' connections.
    pairs: Mapping[tuple[str, str], Connection] = {}
    # The draft node; its name is that of the device that it shares, if it does.
    draft: Device = Device("draft", 0, 1.0)

    def between(self, first: Device, second: Device) -> Connection:
        """Connection of two nodes, with the handling of a message in its latency; a device has no
        link to itself."""
        if first.name == second.name:
            return Connection(HANDLING_SECONDS)
        for pair in ((first.name, second.name), (second.name, first.name)):
            if (connection := self.pairs.get(pair)) is not None:
                return Connection(connection.latency + HANDLING_SECONDS, connection.bandwidth)
        limits = [device.bandwidth for device in (first, second) if device.bandwidth]
        latency = max(first.latency, second.latency) + HANDLING_SECONDS
        return Connection(latency, min(limits, default=0.0))


class PlacedStage(Struct, frozen=True):
    """A device and its layers [first, end)."""

    device: Device
    layers: Span
    # Seconds of a pass, and bytes of memory.
    seconds: float
    memory: int


class Placement(Struct, frozen=True):
    """Stages in the order of the pipeline."""

    stages: tuple[PlacedStage, ...]
    # Seconds of the slowest stage's pass, or of a row on the slowest link.
    slowest: float
    # Seconds of a token without speculation: all passes, links and latencies.
    whole: float
    # For so many of these a row keeps links busy.
    row_seconds: float

    @property
    def link_seconds(self) -> float:
        """The share of links in ``whole``."""
        return max(0.0, self.whole - sum(stage.seconds for stage in self.stages))


class Constraints(Struct, frozen=True):
    """Requirements of a placement."""

    # Number of stages; None: as many as are best.
    stages: int | None = None
    # Devices keep their order.
    ordered: bool = False


FREE = Constraints()


def evaluate(
    target: TargetCost, network: Network, chosen: Sequence[tuple[Device, Span]]
) -> Placement:
    """Placement of layers [first, end) on devices, in the order of the pipeline, with its times in
    seconds."""
    stages = tuple(
        PlacedStage(device, span, target.seconds(span, device.speed), target.memory(span))
        for device, span in chosen
    )
    devices = [stage.device for stage in stages]
    slowest = max(stage.seconds for stage in stages)
    whole = sum(stage.seconds for stage in stages)
    # Tokens and verdicts are small; hidden states travel between stages alone.
    whole += network.between(network.draft, devices[0]).latency
    whole += network.between(devices[-1], network.draft).latency
    sent = 0.0
    for source, receiver in pairwise(devices):
        link = network.between(source, receiver)
        busy = link.row_seconds(target.row_bytes)
        slowest, whole, sent = max(slowest, busy), whole + link.latency + busy, sent + busy
    return Placement(stages, slowest, whole, sent)
