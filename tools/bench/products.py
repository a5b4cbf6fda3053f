"""``python tools/bench products``: matrix products of few rows, by every way of multiplying that
this CPU and this torch have.

One thread, medians of its milliseconds over interleaved repeats. A product's weights are as many
matrices as ``--mib`` holds in float32, in turn, so that no cache has them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.bounds import COUNT, LARGE, Bounds
from tools.bench.options import check_numbers, print_rows

if TYPE_CHECKING:
    from torch import Tensor

    Product = Callable[[Tensor], Tensor]

ROWS = (1, 2, 4, 8, 16, 64)


def add_arguments(parser: Parser) -> None:
    """The arguments of ``bench products``."""
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--mib", type=int, default=128, help="of float32 weights; default: 128")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    shape = Bounds(1, LARGE)
    check_numbers(options, outputs=shape, inputs=shape, mib=COUNT, rows=COUNT, repeats=COUNT)
    print_rows(options, measure(options))
    return 0


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Median ms of each way to multiply, for each number of rows."""
    from asyncspec.plugins.hf.kernels.probing import noise

    shape = options.outputs, options.inputs
    count = max(1, (options.mib << 18) // (shape[0] * shape[1]))
    ways = ways_to_multiply([noise(*shape, seed=seed) for seed in range(count)])
    tries: dict[tuple[str, int], list[float]] = {}
    for repeat in range(options.repeats + 1):
        for rows in options.rows:
            x = noise(rows, shape[1])
            for name, products in ways.items():
                product = products[repeat % count]
                given = x.bfloat16() if name == "torch, bfloat16" else x
                start = time.thread_time()
                product(given)
                if repeat:  # the first round warms up
                    passed = 1e3 * (time.thread_time() - start)
                    tries.setdefault((name, rows), []).append(passed)
    return [
        {"rows": rows} | {name: round(statistics.median(tries[name, rows]), 3) for name in ways}
        for rows in options.rows
    ]


def ways_to_multiply(weights: list[Tensor]) -> dict[str, list[Product]]:
    """Products of each matrix [N, K] of float32 numbers, by the name of how it is kept."""
    import torch

    from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings, can_pack, reads_half
    from asyncspec.plugins.hf.kernels.cpu.half_precision import HalfLinear, UpcastLinear
    from asyncspec.plugins.hf.kernels.cpu.linear import PackedLinear, product_of
    from asyncspec.plugins.hf.kernels.cpu.ort import MlasLinear, import_onnxruntime

    settings = KernelSettings()

    def plain(weight: Tensor) -> Product:
        return lambda x: product_of(x, weight, None, onednn=False)

    def half(weight: Tensor) -> Product:
        return HalfLinear(weight, None, torch.float32, settings)

    def upcast(weight: Tensor) -> Product:
        return UpcastLinear(weight, None, settings)

    narrow = [weight.bfloat16() for weight in weights]
    ways = {"torch, float32": [*map(plain, weights)], "torch, bfloat16": [*map(plain, narrow)]}
    if can_pack():
        ways["oneDNN, float32"] = [PackedLinear(weight, None, settings) for weight in weights]
    with suppress(ImportError):
        import_onnxruntime()
        ways["onnxruntime, float32"] = [MlasLinear(weight, None) for weight in weights]
    if reads_half():
        ways["FBGEMM, float16"] = [half(weight.half()) for weight in weights]
        ways["FBGEMM, bfloat16"] = [*map(half, narrow)]
    return ways | {"bfloat16, widened slice by slice": [*map(upcast, narrow)]}
