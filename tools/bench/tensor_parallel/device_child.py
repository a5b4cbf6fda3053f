"""A device of a tensor-parallel model: a process of its own, run as a file, not imported.

Its argument is an ``Order`` as JSON; the first device prints a ``Result`` as JSON.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path[0] = str(Path(__file__).resolve().parents[3])

from asyncspec.backend.threads import set_thread_defaults  # noqa: E402

set_thread_defaults()  # before torch is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tools.bench.tensor_parallel import megatron, ring  # noqa: E402
from tools.bench.tensor_parallel.order import Order, Result  # noqa: E402
from tools.bench.tensor_parallel.pace import Pace  # noqa: E402

ROUNDS = 20
PASSES = 5


def main() -> None:
    """Compute with the others until everything is measured."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    os.environ.update(
        RANK=str(order.rank),
        WORLD_SIZE=str(order.devices),
        MASTER_ADDR=order.address[0],
        MASTER_PORT=str(order.address[1]),
        GLOO_SOCKET_IFNAME=order.interface,
    )
    from transformers import AutoModelForCausalLM

    from asyncspec.plugins.hf.kernels.process import quiet_transformers

    quiet_transformers()
    dist.init_process_group("gloo")
    with torch.inference_mode():
        load = AutoModelForCausalLM.from_pretrained
        model = load(order.target, dtype=torch.float32).eval()
        result = measure(order, model)
    if order.rank == 0:
        sys.stdout.buffer.write(msgspec.json.encode(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(order: Order, model: Any) -> Result:
    """The text, its speed, and passes of several rows."""
    prompt = torch.tensor(order.prompt)
    text: list[int] = []
    if order.rank == 0:
        out = model.generate(
            prompt[None],
            max_new_tokens=order.tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        text = out[0, len(prompt) :].tolist()
    make = _maker(order, model)
    steps = {rows: _step_seconds(order, rows, model.config.hidden_size) for rows in order.rows}
    layers = make()
    tokens = [int(layers.forward(prompt).argmax())]
    dist.barrier()
    sent, start = sent_bytes(order.interface), time.monotonic()
    for _ in range(order.tokens - 1):
        tokens.append(int(layers.forward(torch.tensor(tokens[-1:])).argmax()))
    seconds = time.monotonic() - start
    total = torch.tensor(float(sent_bytes(order.interface) - sent))
    dist.all_reduce(total)
    passes = {rows: _pass_seconds(layers, prompt[:1].repeat(rows)) for rows in order.rows}
    count = order.tokens - 1
    return Result(tokens == text, count / seconds, total.item() / count, passes, steps)


def _maker(order: Order, model: Any) -> Callable[[], Any]:
    pace = Pace(order.layer_seconds)
    if order.kind == "megatron":
        return lambda: megatron.Layers(model, order.latency, pace)
    return lambda: ring.Layers(model, ring.Ring(order.latency, order.bandwidth), pace)


def _step_seconds(order: Order, rows: int, width: int) -> float:
    if order.kind == "megatron":
        return megatron.step_seconds(rows, width, ROUNDS)
    return ring.Ring(0.0, order.bandwidth).step_seconds(rows, width, ROUNDS)


def _pass_seconds(layers: Any, ids: torch.Tensor) -> float:
    times = []
    for _ in range(PASSES):
        dist.barrier()
        start = time.monotonic()
        layers.forward(ids)
        times.append(time.monotonic() - start)
    return statistics.median(times)


def sent_bytes(interface: str) -> int:
    """Bytes that a network interface has sent."""
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


if __name__ == "__main__":
    main()
