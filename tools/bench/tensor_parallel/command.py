"""``python tools/bench tensor-parallel``: Megatron-LM's and Galaxy's kind on devices with links.

A process for each device, in network namespaces whose lines have a rate (gloo, float32). Megatron's
kind is torch's own tensor parallelism under transformers' plan: two all-reduces a layer. Galaxy's
kind has sequence-parallel norms, and rings of tiles of rows that overlap with the products. Text
must be that of ``generate``. Layers take ``--layer-ms`` divided by the devices, for these share
this machine's cores; latency is waited for at each step of a ring.

"of the formula": a measured pass by the one that ``cost.py`` predicts, and measured bytes by
predicted ones, frames included. The formula's two costs, what a pass takes beside the link and a
ring's step beside its bytes, are those of the first rate and latency, "fitted" there; passes on all
other links are predicted from them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import track

from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.console.bounds import COUNT, Bounds
from asyncspec_nodes.local.children import last_line
from tools.bench.options import check_numbers, print_rows
from tools.bench.random_model import save_random
from tools.bench.tensor_parallel.cost import (
    KINDS,
    Kind,
    Link,
    Model,
    fitted_compute,
    pass_seconds,
    sent_bytes,
    step_bytes,
)
from tools.bench.tensor_parallel.order import Order, Result
from tools.testbed.bed import Bed
from tools.testbed.create import Network
from tools.testbed.ports import free_ports
from tools.testbed.tables import MAX_DEVICES, Description, DeviceTable, NetworkTable

CHILD = Path(__file__).with_name("device_child.py")
PROMPT = tuple(range(3, 35))
BYTES_PER_MBIT = 125_000
PAYLOAD = 0.941
"""The share of a line's bytes that is not frames' and TCP's (docs/results/testbed.md)."""
PORT = 7800
VOCABULARY = 512
SECONDS = 600.0
"""A run that takes longer has failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench tensor-parallel``."""
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[4], metavar="N")
    add("--mbit", type=float, nargs="+", default=[1000, 500, 250, 125], metavar="RATE")
    add("--latency-ms", type=float, nargs="+", default=[0, 1, 5, 20], metavar="MS",
        help="one way; other than the first at the first rate only")  # fmt: skip
    add("--layer-ms", type=float, default=40.0, metavar="MS", help="of a layer on one device; 0: "
        "as long as it takes")  # fmt: skip
    add("--hidden", type=int, default=1024, metavar="N")
    add("--layers", type=int, default=8, metavar="N")
    add("--tokens", type=int, default=12, metavar="N", help="new tokens of the answer")
    add("--rows", type=int, nargs="+", default=[1, 16, 64], metavar="N", help="of timed passes")
    add("--network", choices=get_args(Network), default="auto", help="testbed's")
    add("--json", action="store_true", help="one list on stdout, nothing else")


def run(options: argparse.Namespace) -> int:
    """Measure and print. Exit code 1 where a text is not ``generate``'s."""
    check_numbers(
        options,
        devices=Bounds(2, MAX_DEVICES),
        mbit=Bounds(1, 100_000),
        latency_ms=Bounds(0, 10_000),
        layer_ms=Bounds(0, 10_000),
        hidden=COUNT,
        layers=COUNT,
        tokens=Bounds(2, 1000),
        rows=Bounds(1, 512),
    )
    heads = max(options.devices)
    if options.hidden % (heads * 8) or any(heads % n for n in options.devices):
        raise UserError(
            f"--hidden: give a multiple of {heads * 8}, and devices that divide {heads}"
        )
    cells = [*_cells(options)]
    with tempfile.TemporaryDirectory(prefix="asyncspec-tensor-") as folder:
        target = save_random(_config(options, heads), Path(folder) / "target", torch.float32)
        progress = track(cells, "cells", console=Console(stderr=True))
        fits: dict[tuple[Kind, int], Costs] = {}
        rows = [_measure(options, target, fits, *cell) for cell in progress]
    print_rows(options, rows)
    return 0 if all(row["text"] == "equal" for row in rows) else 1


def _cells(options: argparse.Namespace) -> Iterator[tuple[Kind, int, float, float]]:
    (first, *slower), (least, *late) = options.mbit, options.latency_ms
    lines = [(first, least), *((mbit, least) for mbit in slower), *((first, ms) for ms in late)]
    for devices, (mbit, ms), kind in product(options.devices, lines, KINDS):
        yield kind, devices, mbit, ms


def _config(options: argparse.Namespace, heads: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        initializer_range=0.1,
    )


class Costs(Struct, frozen=True):
    """What the formula takes from the first cell of a kind and a number of devices, by rows."""

    # A pass beside the link.
    compute: dict[int, float]
    # A ring's step beside its bytes.
    step: dict[int, float]


def _fit(kind: Kind, model: Model, result: Result, link: Link) -> Costs:
    steps, computes = {}, {}
    for rows, seconds in result.passes.items():
        sending = step_bytes(kind, model, rows) / link.bandwidth
        steps[rows] = max(0.0, result.steps[rows] - sending)
        whole = Link(link.latency + steps[rows], link.bandwidth)
        computes[rows] = fitted_compute(kind, model, rows, seconds, whole)
    return Costs(computes, steps)


def _measure(
    options: argparse.Namespace,
    target: Path,
    fits: dict[tuple[Kind, int], Costs],
    kind: Kind,
    devices: int,
    mbit: float,
    ms: float,
) -> dict[str, object]:
    """A cell; the first of a kind and a number of devices enters ``fits``."""
    link = Link(ms / 1000, mbit * BYTES_PER_MBIT * PAYLOAD)
    order = Order(
        kind, str(target), 0, devices, ("127.0.0.1", 0), "lo", PROMPT, options.tokens,
        tuple(options.rows), link.bandwidth, link.latency, options.layer_ms / 1000 / devices,
    )  # fmt: skip
    bed = Description(device=(DeviceTable(),) * devices, network=NetworkTable(mbit=mbit))
    with Bed.open(bed, options.network) as standing:
        result = _run(standing, order)
        shaped = standing.namespaces
    model = Model(options.layers, 4 * options.hidden, devices)
    costs = fits.get((kind, devices))
    fitted = costs or fits.setdefault((kind, devices), _fit(kind, model, result, link))
    row: dict[str, object] = {
        "kind": kind,
        "devices": devices,
        "Mbit/s": mbit if shaped else "loopback",
        "latency ms": ms,
        "text": "equal" if result.equal else "DIFFERS",
        "tokens/s": round(result.tokens_per_second, 2),
        "bytes a token": round(result.bytes_per_token),
        "bytes of the formula": round(result.bytes_per_token / sent_bytes(model, 1), 3),
    }
    for rows, seconds in result.passes.items():
        slowed = Link(link.latency + fitted.step[rows], link.bandwidth)
        predicted = pass_seconds(kind, model, rows, fitted.compute[rows], slowed)
        row[f"ms, {rows} rows"] = round(seconds * 1000, 1)
        share = f"{seconds / predicted:.3f}" if costs else "fitted"
        row[f"of the formula, {rows} rows"] = share
    return row


def _run(bed: Bed, order: Order) -> Result:
    """All devices of a bed, until the first one has told what it measured. Raises
    ``ClusterError``."""
    interface = "eth0" if bed.namespaces else "lo"
    port = PORT if bed.namespaces else free_ports(1)[0]
    order = replace(order, address=(bed.devices[0][0], port), interface=interface)
    log = bed.scratch / "devices.log"
    with log.open("wb") as errors:
        processes = [
            bed.start(
                rank,
                [
                    sys.executable,
                    "-P",
                    str(CHILD),
                    msgspec.json.encode(replace(order, rank=rank)).decode(),
                ],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
            )
            for rank in range(order.devices)
        ]
        try:
            out, _ = processes[0].communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"a device has not ended{last_line(log)}") from None
    if processes[0].returncode:
        raise ClusterError(f"a device has failed{last_line(log)}")
    return msgspec.json.decode(out, type=Result)
