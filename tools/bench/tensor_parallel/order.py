"""What a device is told, and what the first one tells."""

from __future__ import annotations

from msgspec import Struct

from tools.bench.tensor_parallel.cost import Kind


class Order(Struct, frozen=True):
    """One device's part of a run."""

    kind: Kind
    # A checkpoint of Llama's shape.
    target: str
    rank: int
    devices: int
    # Where the first device is found.
    address: tuple[str, int]
    # The network interface to the others.
    interface: str
    # Token ids.
    prompt: tuple[int, ...]
    # New tokens.
    tokens: int
    # Rows of the passes that are timed.
    rows: tuple[int, ...]
    # Bytes a second of a device's line.
    bandwidth: float
    # Seconds a message takes to a neighbour, which only a wait can show.
    latency: float = 0.0
    # Of a layer's products on one device; 0: as long as they take.
    layer_seconds: float = 0.0


class Result(Struct, frozen=True):
    """What was measured."""

    # Whether the text is that of ``generate``.
    equal: bool
    tokens_per_second: float
    # Bytes of all devices for a token, as the network's interfaces count them; 0: they cannot.
    bytes_per_token: float
    # Seconds of a pass by its rows.
    passes: dict[int, float]
    # Seconds of a ring's step by the rows that are exchanged, without the latency.
    steps: dict[int, float]
