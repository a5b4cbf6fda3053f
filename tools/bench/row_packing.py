"""``python tools/bench row-packing``: what packing rows of bfloat16 values takes and saves.

``all`` is packing, a link of 125 Mbit/s, and unpacking; ``unpacked`` that link without it.
Microseconds, best of several repeats, medians over tensors.
"""

from __future__ import annotations

import argparse
import statistics
import timeit

import numpy as np

from asyncspec.backend.base import WireTensor
from asyncspec.backend.row_compression import pack, unpack
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.bounds import COUNT
from tools.bench.options import check_numbers, print_rows

WIDTH = 4096
ROWS = (1, 16, 32, 64)
SPREAD = {"normal": 0.0, "channels differ up to tenfold": 1.0, "up to a hundredfold": 2.0}
"""The power of ten within which channels differ."""
MICROSECONDS_A_BYTE = 8 / 125
TENSORS = 5


def add_arguments(parser: Parser) -> None:
    """The arguments of ``bench row-packing``."""
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    check_numbers(options, rows=COUNT, repeats=COUNT)
    cases = [(name, rows) for name in SPREAD for rows in options.rows]
    print_rows(options, [measure(name, rows, options.repeats) for name, rows in cases])
    return 0


def measure(name: str, rows: int, repeats: int) -> dict[str, object]:
    """The figures of some tensors of so many rows."""
    taken = [_of_one(tensor(rows, SPREAD[name], seed), repeats) for seed in range(TENSORS)]
    packing, unpacking, size = (statistics.median(column) for column in zip(*taken, strict=True))
    return {
        "values": name,
        "rows": rows,
        "pack": round(packing, 1),
        "unpack": round(unpacking, 1),
        "bits a value": round(8 * size / (rows * WIDTH), 2),
        "all": round(packing + size * MICROSECONDS_A_BYTE + unpacking),
        "unpacked": round(2 * rows * WIDTH * MICROSECONDS_A_BYTE),
    }


def tensor(rows: int, spread: float, seed: int) -> WireTensor:
    """Normal values [rows, ``WIDTH``] times a factor for each channel, as bfloat16."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, WIDTH)) * 10 ** (spread * rng.random(WIDTH))
    words = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    return WireTensor("bfloat16", (rows, WIDTH), words.view(np.uint8).reshape(-1).data)


def _of_one(plain: WireTensor, repeats: int) -> tuple[float, float, int]:
    """Microseconds to pack and to unpack, and the packed bytes."""
    packed = pack(plain)
    packing = min(timeit.repeat(lambda: pack(plain), number=1, repeat=repeats))
    unpacking = min(timeit.repeat(lambda: unpack(packed), number=1, repeat=repeats))
    return 1e6 * packing, 1e6 * unpacking, packed.data.nbytes
