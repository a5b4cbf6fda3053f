"""Galaxy's layers: norms on a device's own rows, rings that overlap with products in tiles of rows.

Imported by the processes of the devices alone.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.bench.tensor_parallel.cost import PRODUCTS, tile_rows
from tools.bench.tensor_parallel.pace import Pace

_STAMP = 2
"""float32 values that a stamp of eight bytes takes."""


class Ring:
    """A device's two neighbours. A tile carries the time at which it was sent, and arrives no
    sooner than its bytes and then ``latency`` take: all devices of a test share a clock."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        self.rank, self.devices = dist.get_rank(), dist.get_world_size()
        self._latency, self._bandwidth = latency, bandwidth
        self._sent: list[Any] = []

    def send(self, tile: Tensor) -> None:
        """Hand a tile [rows, W] to the next device; returns at once."""
        if not len(tile):
            return
        packet = torch.empty(tile.numel() + _STAMP)
        packet[_STAMP:] = tile.flatten()
        packet[:_STAMP].view(torch.float64)[0] = time.monotonic()
        self._sent.append((dist.isend(packet, (self.rank + 1) % self.devices), packet))

    def receive(self, rows: int, width: int) -> Tensor:
        """The tile [rows, width] of the previous device."""
        if not rows:
            return torch.empty(0, width)
        packet = torch.empty(rows * width + _STAMP)
        dist.recv(packet, (self.rank - 1) % self.devices)
        due = packet[:_STAMP].view(torch.float64).item() + self._latency
        due += packet.nbytes / self._bandwidth
        time.sleep(max(0.0, due - time.monotonic()))
        return packet[_STAMP:].view(rows, width)

    def step_seconds(self, rows: int, width: int, rounds: int) -> float:
        """Seconds of a step when nothing is multiplied: ``rows`` are spread over the devices, and
        every one has a tile, so that all wait for one another."""
        tiles = tile_rows(max(rows, self.devices), self.devices)
        dist.barrier()
        start = time.monotonic()
        for _ in range(rounds):
            tile = torch.zeros(tiles[self.rank], width)
            for step in range(1, self.devices):
                self.send(tile)
                tile = self.receive(tiles[(self.rank - step) % self.devices], width)
            self.flush()
        dist.barrier()
        return (time.monotonic() - start) / rounds / (self.devices - 1)

    def flush(self) -> None:
        """Wait until all tiles are on their way."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


class Layers:
    """A Llama's decoder layers in tensor and sequence parallelism. ``model``: transformers'."""

    def __init__(self, model: Any, ring: Ring, pace: Pace) -> None:
        self.ring, self.pace = ring, pace
        self.model = model
        config = model.config
        self.head = config.head_dim
        self.share = ring.rank, ring.devices
        self.layers = [self._shard(layer) for layer in model.model.layers]
        self.cache: list[tuple[Tensor, Tensor]] = []

    def _shard(self, layer: Any) -> dict[str, Tensor]:
        rank, n = self.share
        attention, mlp = layer.self_attn, layer.mlp
        parts = {"qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
                 "gate_up": [mlp.gate_proj, mlp.up_proj]}  # fmt: skip
        weights = {
            name: torch.cat([linear.weight.chunk(n, 0)[rank] for linear in linears])
            for name, linears in parts.items()
        }
        weights["o"] = attention.o_proj.weight.chunk(n, 1)[rank].contiguous()
        weights["down"] = mlp.down_proj.weight.chunk(n, 1)[rank].contiguous()
        return weights

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [V] behind the last of these tokens [T], which follow those of the cache."""
        rank, n = self.share
        start = self.cache[0][0].shape[1] if self.cache else 0
        tiles = tile_rows(len(ids), n)
        model = self.model.model
        hidden = torch.split(model.embed_tokens(ids), [*tiles])[rank]
        positions = torch.arange(start, start + len(ids))[None]
        rotary = model.rotary_emb(hidden[None], positions)
        for number, (layer, weights) in enumerate(zip(model.layers, self.layers, strict=True)):
            normed = layer.input_layernorm(hidden)
            heads = self._attend(number, self._gathered(normed, tiles, weights["qkv"]), rotary)
            hidden = hidden + self._scattered(heads, tiles, weights["o"])
            normed = layer.post_attention_layernorm(hidden)
            gate, up = self._gathered(normed, tiles, weights["gate_up"]).chunk(2, -1)
            product = torch.nn.functional.silu(gate) * up
            hidden = hidden + self._scattered(product, tiles, weights["down"])
        # The owner of the last row has the answer.
        owner = min(len(ids), n) - 1
        last = hidden[-1].clone() if rank == owner else torch.empty(hidden.shape[-1])
        dist.broadcast(last, owner)
        return self.model.lm_head(model.norm(last))  # type: ignore[no-any-return]

    def _product(self, tile: Tensor, weight: Tensor, rows: int) -> Tensor:
        if not len(tile):
            return tile.new_empty(0, len(weight))
        with self.pace.part(len(tile) / rows / PRODUCTS):
            return tile @ weight.T

    def _gathered(self, own: Tensor, tiles: tuple[int, ...], weight: Tensor) -> Tensor:
        """All rows' product: while one tile is multiplied the next one arrives."""
        rank, n = self.share
        out: list[Tensor] = [own] * n
        tile = own
        for step in range(n):
            index = (rank - step) % n
            if step < n - 1:
                self.ring.send(tile)
            out[index] = self._product(tile, weight, sum(tiles))
            if step < n - 1:
                tile = self.ring.receive(tiles[(index - 1) % n], own.shape[-1])
        self.ring.flush()
        return torch.cat(out)

    def _scattered(self, rows: Tensor, tiles: tuple[int, ...], weight: Tensor) -> Tensor:
        """Own rows of the sum over devices: while a tile's sum travels the next is multiplied."""
        rank, n = self.share
        split = torch.split(rows, [*tiles])
        total = rows.new_empty(0)
        for step in range(n):
            index = (rank - 1 - step) % n
            part = self._product(split[index], weight, len(rows))
            total = part + self.ring.receive(tiles[index], len(weight)) if step else part
            if step < n - 1:
                self.ring.send(total)
        self.ring.flush()
        return total

    def _attend(self, number: int, qkv: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        _, n = self.share
        config = self.model.config
        counts = [config.num_attention_heads // n, *[config.num_key_value_heads // n] * 2]
        parts = torch.split(qkv, [count * self.head for count in counts], -1)
        q, k, v = (part.view(len(part), -1, self.head).transpose(0, 1)[None] for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        k, v = k[0], v[0]
        if number < len(self.cache):
            old_k, old_v = self.cache[number]
            k, v = torch.cat((old_k, k), 1), torch.cat((old_v, v), 1)
            self.cache[number] = k, v
        else:
            self.cache.append((k, v))
        rows, slots = q.shape[2], k.shape[1]
        mask = torch.ones(rows, slots, dtype=torch.bool).tril(slots - rows)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k[None], v[None], attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)
