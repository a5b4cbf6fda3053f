"""Decoder layers in fewer operations than transformers' own modules, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from asyncspec.plugins.hf.attention.attention import AttentionParams, TreeMask
from asyncspec.plugins.hf.kernels.cpu.stacked import stack
from asyncspec.plugins.hf.kernels.probing import noise

_PROBE_ROWS = 5  # of noise


class OptimizedNorm(nn.Module):
    """x / rms(x) in float32, times ``factors`` [W] before or, if ``late``, after rounding."""

    def __init__(self, original: Any, epsilon: float, factors: Tensor, *, late: bool) -> None:
        super().__init__()
        # Kept, so that it counts as this shard's memory.
        self.weight = original.weight
        self.factors, self.epsilon, self._late = factors, epsilon, late

    def forward(self, x: Tensor) -> Tensor:
        """x [..., W] -> [..., W]."""
        wide = x.float()
        # What ``torch.rms_norm`` computes, in two thirds of its operations.
        squares = (wide * wide).sum(-1, keepdim=True)
        out = wide * squares.div_(len(self.factors)).add_(self.epsilon).rsqrt_()
        return out.to(x.dtype) * self.factors if self._late else out.mul_(self.factors).to(x.dtype)


def optimized_norm(original: Any) -> nn.Module:
    """The one with the bits of ``original`` on noise, else ``original``; identity for None."""
    if original is None:
        return nn.Identity()
    weight = getattr(original, "weight", None)
    epsilon = getattr(original, "variance_epsilon", getattr(original, "eps", None))
    if weight is None or weight.dim() != 1 or epsilon is None:
        return original  # type: ignore[no-any-return]
    x = noise(_PROBE_ROWS, len(weight)).to(weight.device, weight.dtype)
    want = original(x)
    # Model families multiply before or after rounding, or by 1 + weight.
    factors = weight.detach()
    for variant, late in ((factors.float(), False), (factors, True), (factors.float() + 1, False)):
        norm = OptimizedNorm(original, epsilon, variant, late=late)
        if torch.equal(norm(x), want):
            return norm
    return original  # type: ignore[no-any-return]


# --- Rotary position embedding.


HalfTables = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""cos and sin [n, ..., R / 2]."""


class CosSin:
    """cos and sin [n, 1, R] of some positions, as ``apply_rotary`` takes them."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._tensors = cos, sin

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self._tensors

    @cached_property
    def half_tables(self) -> HalfTables:
        """As onnxruntime takes them [n, R / 2]: both halves of a head have the same angles, and of
        the second one sin has its own sign."""
        cos, sin = (x.squeeze(1).chunk(2, -1)[1].float().contiguous().numpy() for x in self)
        return cos, sin

    @cached_property
    def pair_tables(self) -> HalfTables:
        """As numpy takes them for pairs of numbers: cos [n, 1, 1, R / 2], and sin [n, 1, 2, R / 2]
        with its signs."""
        shape = -1, 1, 2, self.tensors[0].shape[2] // 2
        cos, sin = (x.float().reshape(shape).numpy() for x in self)
        return cos[:, :, 1:], sin


class CosSinRows(CosSin):
    """Rows ``index`` [n] of others, in that form alone in which layers read them."""

    def __init__(self, window: CosSin, index: list[int]) -> None:
        self._window, self._index = window, index

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        index = torch.tensor(self._index)
        cos, sin = (x.index_select(0, index) for x in self._window)
        return cos, sin

    @cached_property
    def half_tables(self) -> HalfTables:
        return self._rows(self._window.half_tables)

    @cached_property
    def pair_tables(self) -> HalfTables:
        return self._rows(self._window.pair_tables)

    def _rows(self, tables: HalfTables) -> HalfTables:
        cos, sin = tables
        row = self._index[0]
        # A view of a lone row.
        rows: Any = self._index if len(self._index) > 1 else slice(row, row + 1)
        return cos[rows], sin[rows]


ROTARY_WINDOW = 256
"""Positions computed at a time; a multiple of what ``PaddedRotary`` pads to."""

_ALIGNMENT = 64  # positions: windows begin at multiples


class CachedRotary:
    """Rotary embedding of one type of layers (Gemma 3 has two), with a cache of neighbouring
    positions."""

    def __init__(self, original: Any, layer_type: str | None) -> None:
        self._original = original
        self._layer_type = () if layer_type is None else (layer_type,)
        self._start = self._end = 0
        self._window: CosSin | None = None

    def cos_sin(self, hidden: Tensor, positions: Tensor) -> CosSin:
        """Cosines and sines of positions [1, n], in the type of ``hidden`` or of ``original``."""
        if positions.device.type != "cpu":
            # To look at positions would be to wait for the device.
            return signed_cos_sin(*self._original(hidden, positions, *self._layer_type))
        # A lone row's positions take torch, or numpy, longer than its rotation.
        (places,) = positions.tolist()
        low, high = min(places), max(places)
        if self._window is None or not self._start <= low <= high < self._end:
            if high - low >= ROTARY_WINDOW - _ALIGNMENT:
                return signed_cos_sin(*self._original(hidden, positions, *self._layer_type))
            self._start = low // _ALIGNMENT * _ALIGNMENT
            self._end = self._start + ROTARY_WINDOW
            window = torch.arange(self._start, self._end).unsqueeze(0)
            self._window = signed_cos_sin(*self._original(hidden, window, *self._layer_type))
        return CosSinRows(self._window, [place - self._start for place in places])


def signed_cos_sin(cos: Tensor, sin: Tensor) -> CosSin:
    """From transformers' cos and sin [1, n, R], the first half of sin negated: (-x) * s and
    x * (-s) are the same number, which saves the negation of rows in every layer."""
    first, second = sin[0].unsqueeze(1).chunk(2, -1)
    return CosSin(cos[0].unsqueeze(1), torch.cat([-first, second], -1))


def apply_rotary(x: Tensor, cos_sin: CosSin) -> Tensor:
    """x [n, H, D] -> [n, H, D]; where R < D only the first R numbers of a head are rotated."""
    cos, sin = cos_sin
    width = cos.shape[-1]
    if width < x.shape[-1]:
        head, rest = x.split_with_sizes([width, x.shape[-1] - width], -1)
        return torch.cat([apply_rotary(head, cos_sin), rest], -1)
    out = (x * cos).add_(torch.roll(x, width // 2, -1) * sin)
    # OLMo 2 rotates bfloat16 rows in float32.
    return out if out.dtype == x.dtype else out.to(x.dtype)


# --- Attention and the decoder layer around it.


class OptimizedAttention(nn.Module):
    """Attention of ``original``'s parts. Raises ``AttributeError`` where it has others."""

    def __init__(self, original: Any, params: AttentionParams) -> None:
        super().__init__()
        fused = getattr(original, "qkv_proj", None)
        parts = [original.q_proj, original.k_proj, original.v_proj] if fused is None else [fused]
        self.inputs = nn.ModuleList(parts)
        self.o_proj = original.o_proj
        self.params = params
        self.width = width = original.head_dim
        config = original.config
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        self.sizes = [queries, keys, keys]
        self.has_rotary = getattr(original, "use_rope", True)
        self.clip = getattr(config, "clip_qkv", None)
        self.norms = nn.ModuleList()
        # Some families normalize all heads as one row, others each.
        self.norms_heads = False
        if getattr(original, "q_norm", None) is not None:
            self.norms.extend(map(optimized_norm, (original.q_norm, original.k_norm)))
            self.norms_heads = len(original.q_norm.weight) == width != queries

    def heads(self, x: Tensor, cos_sin: CosSin) -> tuple[Tensor, ...]:
        """Hidden states [1, n, H] -> query, key and value [heads, n, D]."""
        query, key, value = self._products(x)
        if self.has_rotary:
            # In one call: few rows cost as much as the number of operations.
            sizes = query.shape[1], key.shape[1]
            rotated = apply_rotary(torch.cat([query, key], 1), cos_sin)
            query, key = rotated.split_with_sizes(sizes, 1)
        return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

    def project(self, attended: Tensor) -> Tensor:
        """What ``TreeMask.attend`` returns [n, heads, D] -> [1, n, H]."""
        projected: Tensor = self.o_proj.forward(attended.flatten(1).unsqueeze(0))
        return projected

    def _products(self, x: Tensor) -> list[Tensor]:
        """Query, key and value [n, heads, D]."""
        shape = (x.shape[1], -1, self.width)
        products = [part.forward(x) for part in self.inputs]
        if len(products) == 1:
            products = [*products[0].split_with_sizes(self.sizes, -1)]
        for i, norm in enumerate(self.norms):
            products[i] = norm.forward(products[i].view(shape) if self.norms_heads else products[i])
        if self.clip is not None:
            products = [part.clamp(-self.clip, self.clip) for part in products]
        return [part.view(shape) for part in products]


class OptimizedLayer(nn.Module):
    """A decoder layer. Norms are where a family has them: before attention and MLP (Llama), after
    both (OLMo 2) or on all four sides (Gemma 2). Raises ``AttributeError`` where ``original`` has
    other parts."""

    def __init__(self, original: Any, params: AttentionParams) -> None:
        super().__init__()
        self.attention = OptimizedAttention(original.self_attn, params)
        self.mlp = optimized_mlp(original.mlp)
        self.scale = getattr(original, "residual_multiplier", 1.0)
        after, before_mlp = "post_attention_layernorm", "pre_feedforward_layernorm"
        if not hasattr(original, "post_feedforward_layernorm"):
            # Without a norm behind the MLP, ``post_attention_layernorm`` is the one before it.
            after, before_mlp = "", after
        names = ("input_layernorm", after, before_mlp, "post_feedforward_layernorm")
        self.norms = nn.ModuleList(optimized_norm(getattr(original, n, None)) for n in names)

    def stack_inputs(self) -> None:
        """Keep matrices of the same rows as one, where they wait for it."""
        self.attention.inputs = stack(self.attention.inputs, self.attention.sizes)
        if isinstance(self.mlp, OptimizedMLP):
            widths = [self.mlp.down_proj.in_features] * 2
            self.mlp.inputs = stack(self.mlp.inputs, widths)

    def forward(self, hidden: Tensor, cos_sin: CosSin, tree: TreeMask) -> Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        attended = tree.attend(self.attention.params, *self.before(hidden, cos_sin))
        return self.after(attended, hidden)

    # ``forward`` throughout: calling a module looks for hooks, and only whole layers and the last
    # norm have any (``stage.py``).

    def before(self, hidden: Tensor, cos_sin: CosSin) -> tuple[Tensor, ...]:
        """What attention reads, as ``OptimizedAttention.heads``."""
        norm: Any = self.norms[0]
        return self.attention.heads(norm.forward(hidden), cos_sin)

    def after(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """The layer's output [1, n, H], from its input and what attention returns [n, heads, D]."""
        _, after, before_mlp, after_mlp = self.norms
        out: Tensor = after.forward(self.attention.project(attended))
        hidden = self._add_residual(out, hidden)
        out = after_mlp.forward(self.mlp.forward(before_mlp.forward(hidden)))
        return self._add_residual(out, hidden)

    def _add_residual(self, out: Tensor, hidden: Tensor) -> Tensor:
        """In place: nothing else refers to ``out``."""
        return (out if self.scale == 1 else out.mul_(self.scale)).add_(hidden)


class OptimizedMLP(nn.Module):
    """A gated feed-forward block."""

    def __init__(self, original: Any, activation: Any) -> None:
        super().__init__()
        fused = getattr(original, "gate_up_proj", None)
        parts = [original.gate_proj, original.up_proj] if fused is None else [fused]
        self.inputs = nn.ModuleList(parts)
        self.activation = activation
        self.down_proj = original.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """x [1, n, H] -> [1, n, H]."""
        products = [part.forward(x) for part in self.inputs]
        gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
        out: Tensor = self.down_proj.forward(self.activation(gate).mul_(up))
        return out


def optimized_mlp(original: Any) -> nn.Module:
    """``original`` as ``OptimizedMLP``; itself where it is something else, such as experts."""
    for name in ("act_fn", "activation_fn"):
        if hasattr(original, name) and isinstance(getattr(original, "down_proj", None), nn.Module):
            return OptimizedMLP(original, getattr(original, name))
    return original  # type: ignore[no-any-return]
