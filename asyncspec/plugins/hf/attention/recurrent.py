"""Layers with a state of a fixed size in place of keys and values, over a tree: gated delta nets,
Mamba-2, short convolutions, which have the last inputs alone.

The state after a token is a function of the state after its parent and of the token's key, value,
decay and write strength (Gated Delta Networks, section 3.1; ``step``). A node's state is megabytes
large and these inputs are kilobytes, so a session keeps the inputs of its speculative nodes by
slot, the state before the tip, and the states of a few nodes that were computed last. Any other is
computed again from the nearest of those, in the same steps, so its bits are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from msgspec import Struct
from torch import Tensor, nn

from asyncspec.core.jobs import Row
from asyncspec.plugins.hf.kernels.device import CPU, Device

KEPT_STATES = 8
"""Nodes' states that a layer of a session keeps beside the one before the tip."""

UNCOMMITTED = 256
"""Nodes of a session's tree, or of a chunk of its prompt, that memory is counted for."""

NO_USE: Mapping[int, int] = {}
"""Where no state is needed again."""

_FLOAT = 4  # bytes: states and their inputs are float32


class StateShape(Struct, frozen=True):
    """Sizes of a layer's state; a short convolution has no heads."""

    heads: int
    key_width: int
    value_width: int
    # Channels of the convolution over the inputs of queries, keys and values, and its tokens.
    channels: int
    kernel: int
    # Heads share keys in equal groups.
    key_heads: int
    # Factors of a head's old state: one, or one for each number of a key.
    decays: int = 1

    @property
    def read(self) -> tuple[int, ...]:
        """Shape of what a row reads."""
        return (self.heads, self.value_width) if self.heads else (self.channels,)

    def session_bytes(self) -> int:
        """Bytes of the states that a session keeps at most, one of them in the making, and of the
        inputs of ``UNCOMMITTED`` nodes."""
        state = self.heads * self.key_width * self.value_width
        node = self.channels + self.key_heads * self.key_width
        node += self.heads * (self.value_width + self.decays + 1)
        # Beside those of nodes: before the tip, in the making, and kept for other sessions.
        numbers = (KEPT_STATES + 3) * state + 2 * self.kernel * self.channels + UNCOMMITTED * node
        return numbers * _FLOAT


class Inputs(Struct, frozen=True):
    """What enters the state at one node, in float32, in memory of its own."""

    # Key [key heads, K]; value [heads, V].
    key: Tensor
    value: Tensor
    # Factor of the old state [heads], or of its rows [heads, K].
    decay: Tensor
    # Share of the value that replaces what is stored at the key [heads]; None: it is added.
    strength: Tensor | None = None


def step(state: Tensor, inputs: Inputs) -> Tensor:
    """The state [heads, K, V] after a node, from the one after its parent."""
    new = state * inputs.decay.view(len(state), -1, 1)
    key = inputs.key.repeat_interleave(len(state) // len(inputs.key), 0)
    if inputs.strength is None:
        return new.baddbmm_(key[:, :, None], inputs.value[:, None])
    remembered = torch.bmm(key[:, None], new)
    delta = (inputs.value[:, None] - remembered) * inputs.strength[:, None, None]
    return new.baddbmm_(key[:, :, None], delta)


def convolved(windows: Tensor, convolution: nn.Module) -> Tensor:
    """What a convolution by channel makes of windows [n, kernel, channels]: [n, channels], in
    float32 and in one order."""
    weight, bias = convolution.get_parameter("weight")[:, 0].float(), convolution.bias
    mixed = windows[:, 0] * weight[:, 0]
    for place in range(1, windows.shape[1]):
        mixed += windows[:, place] * weight[:, place]
    return mixed + bias.float() if isinstance(bias, Tensor) else mixed


class StateCache:
    """The states of one layer in one session."""

    def __init__(self, shape: StateShape, device: Device = CPU) -> None:
        self.shape = shape
        # The state after slots [0, base), and the convolution's inputs [kernel - 1, channels] of
        # the last of them, with zeros before the first token.
        self.base = 0
        state = (shape.heads, shape.key_width, shape.value_width)
        self._state = torch.zeros(state, device=device.torch)
        self._window = torch.zeros(shape.kernel - 1, shape.channels, device=device.torch)
        # By slot, from ``base`` on.
        self._channels: dict[int, Tensor] = {}
        self._inputs: dict[int, Inputs] = {}
        self._states: dict[int, Tensor] = {}
        # Slots after which the state and the window are kept, and these, once they are computed.
        self._border = 0
        self._kept: tuple[Tensor, Tensor] | None = None

    def begin(self, base: int, state: Tensor, window: Tensor) -> None:
        """Begin behind ``base`` slots with their state and the convolution's last inputs."""
        self.base, self._state, self._window = base, state, window

    def windows(self, committed: int, rows: Sequence[Row], channels: Tensor) -> Tensor:
        """Store the convolution's inputs [n, channels] of a pass; those of each row and the rows
        before it [n, kernel, channels]. Raises ``ValueError`` for a path that is not known."""
        self._advance(committed)
        for row, inputs in zip(rows, channels.float(), strict=True):
            self._channels[row.slot] = inputs.clone()
            self._states.pop(row.slot, None)
        kernel = self.shape.kernel
        windows: list[Tensor] = []
        for row in rows:
            last = self._path(committed, row)[-kernel:]
            windows += self._window[len(self._window) - (kernel - len(last)) :].unbind()
            windows += [self._channels[slot] for slot in last]
        return torch.stack(windows).view(len(rows), kernel, -1)

    def read(
        self, committed: int, rows: Sequence[Row], queries: Tensor, updates: Sequence[Inputs]
    ) -> Tensor:
        """What queries [n, heads, K] read from the states after their rows: [n, heads, V]."""
        for row, update in zip(rows, updates, strict=True):
            self._inputs[row.slot] = update
        paths = [self._path(committed, row) for row in rows]
        out = queries.new_empty(len(rows), self.shape.heads, self.shape.value_width)
        order, last_use = visits(paths)
        for visit, i in enumerate(order):
            state = self._after(paths[i], visit, last_use)
            out[i] = torch.bmm(queries[i][:, None], state)[:, 0]
        return out

    def copy_prefix(self, source: StateCache, slots: int) -> None:
        """Begin with the first ``slots`` slots of another session. Raises ``ValueError`` where
        their state is not kept any more."""
        if source.base > slots:
            if source._border != slots or source._kept is None:
                raise ValueError(f"the state after {slots} tokens is not kept")
            state, window = source._kept
            self.begin(slots, state, window.clone())
            return
        self.base, self._state, self._window = source.base, source._state, source._window.clone()
        for slot in range(self.base, slots):
            self._channels[slot] = source._channels[slot]
            if self.shape.heads:
                self._inputs[slot] = source._inputs[slot]

    def keep(self, slots: int) -> None:
        """Keep the state after the first ``slots`` slots, for sessions that begin so."""
        self._border = slots
        if slots == self.base:
            self._kept = self._state, self._window

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Slot ``start + i`` gets the contents of slot ``keep[i]``; other slots are freed."""
        moves = {slot: slot for slot in self._channels if slot < start}
        moves |= {old: start + i for i, old in enumerate(keep)}
        self._channels = {moves[slot]: x for slot, x in self._channels.items() if slot in moves}
        self._inputs = {moves[slot]: x for slot, x in self._inputs.items() if slot in moves}
        self._states = {moves[slot]: x for slot, x in self._states.items() if slot in moves}

    def trim(self, slots: int) -> None:
        """Keep the first ``slots`` slots alone."""
        self.compact(slots, ())
        self._states.clear()

    def check(self, committed: int) -> None:
        """Raise ``AssertionError`` where the invariants are violated."""
        assert self.base <= committed
        assert min(self._channels, default=self.base) >= self.base
        assert self._inputs.keys() <= self._channels.keys()
        assert self._states.keys() <= self._inputs.keys()
        assert len(self._states) <= KEPT_STATES

    def _path(self, committed: int, row: Row) -> tuple[int, ...]:
        return (*range(self.base, committed), *row.visible)

    def _advance(self, committed: int) -> None:
        """Move ``base`` behind the tip: a draft model computes the tip's row once more."""
        if committed < self.base:
            raise ValueError(f"the state after {committed} tokens is not kept")
        base = max(committed - 1, 0)
        if self.base < self._border < base:
            self._move(self._border)
        self._move(base)

    def _move(self, base: int) -> None:
        path = (*range(self.base, base),)
        if not path:
            return
        computed = self._inputs if self.shape.heads else self._channels
        if unknown := [slot for slot in path if slot not in computed]:
            raise ValueError(f"slot {unknown[0]} was never computed")
        if self.shape.heads:
            self._state = self._after(path)
        recent = [*self._window.unbind(), *(self._channels[slot] for slot in path)]
        self._window = torch.stack(recent[len(recent) - len(self._window) :])
        self.base = base
        if base == self._border:
            self._kept = self._state, self._window
        for stored in (self._channels, self._inputs, self._states):
            for slot in [slot for slot in stored if slot < base]:
                del stored[slot]

    def _after(
        self, path: Sequence[int], visit: int = 0, last_use: Mapping[int, int] = NO_USE
    ) -> Tensor:
        """The state after the slots of a path from ``base`` on. ``last_use``: as ``visits`` says,
        ``visit`` being the number of this one."""
        length = len(path)
        while length and path[length - 1] not in self._states:
            length -= 1
        state = self._states[path[length - 1]] if length else self._state
        for slot in path[length:]:
            state = step(state, self._inputs[slot])
            self._states[slot] = state
            while len(self._states) > KEPT_STATES:
                used = (slot for slot in self._states if last_use.get(slot, 0) <= visit)
                if (gone := next(used, None)) is None:
                    gone = max(self._states, key=last_use.__getitem__)
                del self._states[gone]
        return state


def visits(paths: Sequence[Sequence[int]]) -> tuple[list[int], dict[int, int]]:
    """The order in which to visit nodes, given by their paths, so that few states are needed at a
    time, and by slot the number of the visit that needs its state last.

    Depth first, and from a node into its largest subtree last, when its own state may go: the
    states that are needed are those above smaller subtrees, each less than half as large as the one
    before, so they are no more than the logarithm of the number of nodes.
    """
    root = -1
    below: dict[int, list[int]] = {root: []}
    for path in paths:
        child = None
        for slot in chain(reversed(path), (root,)):
            new = slot not in below
            children = below.setdefault(slot, [])
            if child is not None:
                children.append(child)
            if not new:
                break
            child = slot
    size: dict[int, int] = {}
    for slot in reversed(_preorder(below, root)):
        below[slot].sort(key=size.__getitem__)
        size[slot] = 1 + sum([size[child] for child in below[slot]])
    parents = {children[-1]: slot for slot, children in below.items() if children}
    numbers = {path[-1]: i for i, path in enumerate(paths)}
    order: list[int] = []
    last_use: dict[int, int] = {}
    for slot in _preorder(below, root):
        if slot in parents:
            last_use[parents[slot]] = len(order)
        if slot in numbers:
            order.append(numbers[slot])
    return order, last_use


def _preorder(below: Mapping[int, Sequence[int]], root: int) -> list[int]:
    """All nodes of a tree, every one before those below it."""
    order, waiting = [], [root]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(below[order[-1]])
    return order
