"""How long a pass of a tensor-parallel model takes, and what it sends. Pure.

Per layer two all-reduces (Megatron-LM), each a ring of ``2 (n - 1)`` steps over ``n`` devices.
Galaxy has a reduce-scatter and an all-gather in each one's place, whose steps overlap with the
tiles of the product before or behind it; its tiles are rows.
"""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

Kind = Literal["megatron", "galaxy"]
KINDS: tuple[Kind, ...] = ("megatron", "galaxy")

EXCHANGES = 2
"""All-reduces of a layer: behind attention and behind the feed-forward network."""

PRODUCTS = 4
"""Products of a layer that Galaxy overlaps with a ring: query, key and value; output; gate and up;
down."""

_HALVINGS = 50


class Model(Struct, frozen=True):
    """What is parallel: ``layers`` of hidden states of ``row_bytes``, on ``devices``."""

    layers: int
    row_bytes: int
    devices: int


class Link(Struct, frozen=True):
    """A device's line, each way."""

    # Seconds of a step of a ring beside its bytes.
    latency: float = 0.0
    # Bytes a second.
    bandwidth: float = math.inf


def sent_bytes(model: Model, rows: int) -> float:
    """Bytes that all devices together send in a pass over ``rows``, of either kind: each exchange
    takes every row ``2 (n - 1)`` times over a line."""
    steps = 2 * (model.devices - 1)
    return EXCHANGES * model.layers * steps * rows * model.row_bytes


def step_bytes(kind: Kind, model: Model, rows: int) -> float:
    """Bytes that a device sends in a step of a ring."""
    tile = rows / model.devices if kind == "megatron" else tile_rows(rows, model.devices)[0]
    return tile * model.row_bytes


def pass_seconds(kind: Kind, model: Model, rows: int, compute: float, link: Link) -> float:
    """Seconds of a pass over ``rows``. ``compute``: of all products on one of the devices."""
    if kind == "megatron":
        step = link.latency + step_bytes(kind, model, rows) / link.bandwidth
        return compute + EXCHANGES * model.layers * 2 * (model.devices - 1) * step
    product = compute / (PRODUCTS * model.layers)
    return PRODUCTS * model.layers * _ring_seconds(model, rows, product, link)


def _ring_seconds(model: Model, rows: int, product: float, link: Link) -> float:
    """A product and the ring with which it overlaps: device ``i`` has the ``i``-th tile."""
    n = model.devices
    tiles = tile_rows(rows, n)
    wire = link.latency + step_bytes("galaxy", model, rows) / link.bandwidth
    tile = product * tiles[0] / rows
    if rows < n:
        # Few devices have a tile, of one row. It takes n steps from its owner through a product
        # and the next one's sum back to the owner: others begin as soon as they have the row.
        return product + n / 2 * wire
    return tile + (n - 1) * max(tile, wire)


def fitted_compute(kind: Kind, model: Model, rows: int, seconds: float, link: Link) -> float:
    """The ``compute`` with which ``pass_seconds`` is ``seconds``: what a measured pass takes beside
    the link, from which passes on other links follow. 0 where the link alone takes longer."""
    low, high = 0.0, seconds
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if pass_seconds(kind, model, rows, middle, link) < seconds:
            low = middle
        else:
            high = middle
    return high if low else 0.0


def tile_rows(rows: int, devices: int) -> tuple[int, ...]:
    """Rows of each device's tile, the largest first."""
    share, more = divmod(rows, devices)
    return tuple(share + (device < more) for device in range(devices))
