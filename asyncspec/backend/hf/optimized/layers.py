"""RMS norms in few operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asyncspec.backend.hf.attention import Asked, Tree
from asyncspec.backend.hf.probing import noise
from asyncspec.core.errors import CheckpointError, first_line

_ROWS = 5


class LeanNorm(nn.Module):
    """x / rms(x) in float32, times ``inner`` before it is rounded to the type of ``x``, and times
    ``outer`` after."""

    def __init__(
        self,
        family: Any,
        epsilon: float,
        inner: torch.Tensor | None,
        outer: torch.Tensor | None,
    ) -> None:
        super().__init__()
        # The parameter as it was: it counts as this shard's memory.
        self.weight = family.weight
        self._inner, self._outer = inner, outer
        (self._width,) = self.weight.shape
        self.epsilon = epsilon

    @property
    def factors(self) -> torch.Tensor:
        """[W]: what the numbers of a float32 row are multiplied by, once they are normed."""
        factors = self._outer if self._inner is None else self._inner
        assert factors is not None, "every form has one of them"
        return factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., W] -> [..., W]."""
        wide = x if x.dtype == torch.float32 else x.float()
        # What ``torch.rms_norm`` does, which takes half as many operations again for it.
        squares = (wide * wide).sum(-1, keepdim=True)
        out = wide * squares.div_(self._width).add_(self.epsilon).rsqrt_()
        if self._inner is not None:
            out = out.mul_(self._inner)
        if out.dtype != x.dtype:
            out = out.to(x.dtype)
        return out if self._outer is None else out * self._outer


def lean_norm(family: Any) -> nn.Module:
    """A family's RMS norm in the form that has its bits on noise; itself where none has, or where
    it is something else."""
    weight = getattr(family, "weight", None)
    epsilon = getattr(family, "variance_epsilon", getattr(family, "eps", None))
    if weight is None or weight.dim() != 1 or epsilon is None:
        return family  # type: ignore[no-any-return]
    x = noise(_ROWS, len(weight)).to(weight.dtype)
    want = family(x)
    fitting = (lean for lean in _forms(family, epsilon) if torch.equal(lean(x), want))
    return next(fitting, family)


def _forms(family: Any, epsilon: float) -> Iterator[LeanNorm]:
    """Families weight before or after rounding, or with 1 + weight."""
    weight = family.weight.detach()
    yield LeanNorm(family, epsilon, weight.float(), None)
    yield LeanNorm(family, epsilon, None, weight)
    yield LeanNorm(family, epsilon, weight.float() + 1, None)


# --- Rotary position embedding, with what all layers need of it made once for many passes.


class Turns(tuple[torch.Tensor, torch.Tensor]):
    """cos and sin [n, 1, R] as ``turn`` takes them."""

    @cached_property
    def halves(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """cos and sin [n, R / 2] as onnxruntime takes them, made once for all layers: both halves
        of a head have the same angles, and of the second one sin has its own sign."""
        cos, sin = (x.squeeze(1).chunk(2, -1)[1].contiguous().numpy() for x in self)
        return cos, sin


WINDOW = 256
"""Positions that are made at a time; a multiple of what ``WholeRotary`` asks for."""

_ALIGNED = 64


class LeanRotary:
    """A family's rotary embedding for layers of one kind (Gemma 3 has two). Passes ask for
    neighbouring positions, so a window of them is kept; its numbers are those of any other."""

    def __init__(self, family: Any, kind: str | None) -> None:
        self._family = family
        self._kind = () if kind is None else (kind,)
        self._start = self._end = 0
        self._table = torch.empty(0)

    def turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> Turns:
        """Of positions [1, n], in the type of ``hidden`` or as the family makes them."""
        low, high = (int(x) for x in positions.aminmax())
        if not self._start <= low <= high < self._end:
            if high - low >= WINDOW - _ALIGNED:
                return signed(*self._family(hidden, positions, *self._kind))
            self._start = low // _ALIGNED * _ALIGNED
            self._end = self._start + WINDOW
            window = torch.arange(self._start, self._end).unsqueeze(0)
            made = signed(*self._family(hidden, window, *self._kind))
            self._table = torch.stack(made, 1)
        cos, sin = self._table.index_select(0, positions[0] - self._start).unbind(1)
        return Turns((cos, sin))


def has_kinds(family: Any) -> bool:
    """Whether a rotary embedding turns layers of different types differently."""
    inmost = getattr(family, "function", family)  # without what it was wrapped in
    return "layer_type" in inspect.signature(inmost.forward).parameters


def signed(cos: torch.Tensor, sin: torch.Tensor) -> Turns:
    """Of a family's cos and sin [1, n, R], the first half of sin with its sign turned: (-x) * s and
    x * (-s) are the same number, and rows need not be negated in every layer."""
    first, second = sin[0].unsqueeze(1).chunk(2, -1)
    return Turns((cos[0].unsqueeze(1), torch.cat([-first, second], -1)))


def turn(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """x [n, H, D] -> [n, H, D]; of a family that turns R < D numbers of a head the first R are."""
    cos, sin = turns
    width = cos.shape[-1]
    if width < x.shape[-1]:
        head, rest = x.split_with_sizes([width, x.shape[-1] - width], -1)
        return torch.cat([turn(head, turns), rest], -1)
    out = (x * cos).add_(torch.roll(x, width // 2, -1) * sin)
    # OLMo 2 turns bfloat16 rows in float32.
    return out if out.dtype == x.dtype else out.to(x.dtype)


# --- A layer's attention without detours: products, norms, turns, the tree, the last product.


class LeanAttention(nn.Module):
    """Grouped-query attention with the linear layers and norms of a family's module. Raises
    ``AttributeError`` where it has other parts."""

    def __init__(self, family: Any, asked: Asked) -> None:
        super().__init__()
        fused = getattr(family, "qkv_proj", None)
        parts = [family.q_proj, family.k_proj, family.v_proj] if fused is None else [fused]
        self.inputs = nn.ModuleList(parts)
        self.o_proj = family.o_proj
        self.asked = asked
        self.width = width = family.head_dim
        config = family.config
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        self.sizes = [queries, keys, keys]
        self.turns = getattr(family, "use_rope", True)
        self.clip = getattr(config, "clip_qkv", None)
        self.norms = nn.ModuleList()
        # Some families norm all heads as one row, others each.
        self.norms_heads = False
        if getattr(family, "q_norm", None) is not None:
            self.norms.extend(map(lean_norm, (family.q_norm, family.k_norm)))
            self.norms_heads = len(family.q_norm.weight) == width != queries

    def forward(self, x: torch.Tensor, turns: Turns, tree: Tree) -> torch.Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        query, key, value = self._heads(x)
        if self.turns:
            # Together: what few rows take is mostly a matter of how many operations there are.
            sizes = query.shape[1], key.shape[1]
            turned = turn(torch.cat([query, key], 1), turns)
            query, key = turned.split_with_sizes(sizes, 1)
        heads = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        out = tree.attend(self.asked, *heads)
        mixed: torch.Tensor = self.o_proj.forward(out.flatten(1).unsqueeze(0))
        return mixed

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value [n, heads, D]."""
        products = [part.forward(x) for part in self.inputs]
        if len(products) == 1:
            products = products[0].split_with_sizes(self.sizes, -1)
        if self.norms and not self.norms_heads:
            self._norm(products)
        if self.clip is not None:
            products = [part.clamp(-self.clip, self.clip) for part in products]
        query, key, value = products
        shape = (x.shape[1], -1, self.width)
        heads = [query.view(shape), key.view(shape), value.view(shape)]
        if self.norms_heads:
            self._norm(heads)
        return heads[0], heads[1], heads[2]

    def _norm(self, parts: list[torch.Tensor]) -> None:
        """Queries and keys, in place of what they were."""
        for i, norm in enumerate(self.norms):
            parts[i] = norm.forward(parts[i])


# --- A decoder layer: attention and feed-forward block around the residual stream.

_BEFORE, _AFTER = "input_layernorm", "post_attention_layernorm"
_BEFORE_BLOCK, _AFTER_BLOCK = "pre_feedforward_layernorm", "post_feedforward_layernorm"


class LeanLayer(nn.Module):
    """Norms stand where a family has them: before attention and block (Llama), after both (OLMo 2)
    or on all four sides (Gemma 2). Raises ``AttributeError`` where it has other parts."""

    def __init__(self, family: Any, asked: Asked) -> None:
        super().__init__()
        self.attention = LeanAttention(family.self_attn, asked)
        self.block = lean_block(family.mlp)
        self.scale = getattr(family, "residual_multiplier", 1.0)
        # With a norm after the block, ``post_attention_layernorm`` means what it says.
        after = hasattr(family, _AFTER_BLOCK)
        names = (
            (_BEFORE, _AFTER, _BEFORE_BLOCK, _AFTER_BLOCK) if after else (_BEFORE, "", _AFTER, "")
        )
        self.norms = nn.ModuleList(_norm(family, name) for name in names)

    def forward(self, hidden: torch.Tensor, turns: Turns, tree: Tree) -> torch.Tensor:
        """Hidden states [1, n, H] -> [1, n, H]."""
        # ``forward`` throughout: a module that is called looks for hooks, and only whole layers and
        # the last norm ever have any (``tapped.py``).
        before, after, before_block, after_block = self.norms
        out: torch.Tensor = after.forward(
            self.attention.forward(before.forward(hidden), turns, tree)
        )
        hidden = self._added(out, hidden)
        out = after_block.forward(self.block.forward(before_block.forward(hidden)))
        return self._added(out, hidden)

    def _added(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """In place of ``out``, which nobody else has."""
        return (out if self.scale == 1 else out.mul_(self.scale)).add_(hidden)


class LeanBlock(nn.Module):
    """A gated feed-forward block."""

    def __init__(self, family: Any, activation: Any) -> None:
        super().__init__()
        fused = getattr(family, "gate_up_proj", None)
        parts = [family.gate_proj, family.up_proj] if fused is None else [fused]
        self.inputs = nn.ModuleList(parts)
        self.activation = activation
        self.down_proj = family.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, n, H] -> [1, n, H]."""
        products = [part.forward(x) for part in self.inputs]
        gate, up = products if len(products) == 2 else products[0].chunk(2, -1)
        out: torch.Tensor = self.down_proj.forward(self.activation(gate).mul_(up))
        return out


def lean_block(family: Any) -> nn.Module:
    """A family's block; itself where it is something else, as with experts."""
    for name in ("act_fn", "activation_fn"):
        if hasattr(family, name) and isinstance(getattr(family, "down_proj", None), nn.Module):
            return LeanBlock(family, getattr(family, name))
    return family  # type: ignore[no-any-return]


def _norm(family: Any, name: str) -> nn.Module:
    module = getattr(family, name, None)
    return nn.Identity() if module is None else lean_norm(module)


# --- A model's layers from embedding to last norm, in place of a family's own loop over them.


class Output:
    """What a family's head reads of its body's result: the fields that the family's own result
    has, whatever this release of transformers calls them. To make one of transformers' own takes
    20 us instead of .3."""

    def __init__(self, last_hidden_state: torch.Tensor, others: Mapping[str, None]) -> None:
        self.__dict__.update(others)
        self.last_hidden_state = last_hidden_state


class LeanBody(nn.Module):
    """Made of the modules of a family's own body, of whose result ``result`` is an example. Raises
    ``AttributeError`` or ``TypeError`` where it has other modules, or a result of other kind."""

    def __init__(self, family: Any, asked: Sequence[Asked], result: Any) -> None:
        super().__init__()
        # Caches and the like, which nobody asks for: a head is tried without them (``fit.py``).
        self._others: dict[str, None] = dict.fromkeys(field.name for field in fields(result))
        self.embed_tokens = family.embed_tokens
        self.layers = nn.ModuleList(map(LeanLayer, family.layers, asked))
        self.norm = lean_norm(family.norm)
        self._scale = getattr(family, "embedding_multiplier", 1.0)
        typed = has_kinds(family.rotary_emb)
        kinds = [layer.self_attn.layer_type if typed else None for layer in family.layers]
        self._kinds: list[str | None] = kinds
        self._rotary = {kind: LeanRotary(family.rotary_emb, kind) for kind in kinds}

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor,
        tree: Tree,
        **_: Any,
    ) -> Output:
        """Tokens [1, n] or hidden states [1, n, H]; positions [1, n]."""
        hidden: Any = inputs_embeds if input_ids is None else self.embed_tokens(input_ids)
        if self._scale != 1:
            hidden = hidden * self._scale
        # Of a shortened shard there are more kinds than layers.
        for turns, layer in zip(self.turns(hidden, position_ids), self.layers, strict=False):
            hidden = layer(hidden, turns, tree)
        return Output(self.norm(hidden), self._others)

    def turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> list[Turns]:
        """For each layer; positions [1, n]."""
        made = {kind: each.turns(hidden, positions) for kind, each in self._rotary.items()}
        return [made[kind] for kind in self._kinds]


# --- Whether a model's body may be lean: where its result has the family's bits.
# The family's own code runs once over a few rows of noise, and tells what it asks of the tree
# (scaling, window, cap); then the lean body does. A release of transformers that computes
# something else keeps its own code, and takes longer. One whose own code does not take our
# arguments, or attends without our tree, is refused.


class Listening(Tree):
    """Instead of attention: remembers what layers give it, and answers with the queries."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked: list[Asked] = []
        self.heard: list[torch.Tensor] = []

    def mix(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``Tree``."""
        self.asked.append(asked)
        self.heard += (query, key, value)
        return query.transpose(0, 1)

    def same(self, other: Listening) -> bool:
        """Whether both were given the same."""
        if self.asked != other.asked or len(self.heard) != len(other.heard):
            return False
        return all(map(torch.equal, self.heard, other.heard))


def make_lean(model: Any, run: Callable[[Tree], torch.Tensor], count: int) -> str:
    """Exchange the body of a transformers causal LM where that changes no bit. Returns why it was
    not exchanged, "" where it was. ``run`` is a pass of ``count`` rows of noise through it, over a
    given tree.

    Raises ``CheckpointError`` where the family's own code cannot run such a pass.
    """
    theirs, ours = Listening(count), Listening(count)
    family = model.model
    try:
        want, result = _results(model, run, theirs)
    except (AttributeError, TypeError, ValueError) as error:
        raise _unknown(model, first_line(error)) from error
    if [asked.layer for asked in theirs.asked] != list(range(len(family.layers))):
        raise _unknown(model, "its layers do not attend through transformers' AttentionInterface")
    try:
        model.model = LeanBody(family, theirs.asked, result)
        got, made = _results(model, run, ours)
        # Scores that are bent to a cap may hide a difference of hidden states.
        hidden = torch.equal(made.last_hidden_state, result.last_hidden_state)
        if hidden and torch.equal(got, want) and ours.same(theirs):
            return ""
        why = "results differ"
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = first_line(error)  # its parts are not those we know
    model.model = family
    return why


def _results(
    model: Any, run: Callable[[Tree], torch.Tensor], tree: Tree
) -> tuple[torch.Tensor, Any]:
    """What ``run`` returns, and what the model's body does inside it."""
    results: list[Any] = []
    hook = model.model.register_forward_hook(lambda _body, _inputs, out: results.append(out))
    try:
        return run(tree), *results
    finally:
        hook.remove()


def _unknown(model: Any, why: str) -> CheckpointError:
    import transformers

    return CheckpointError(
        f"{type(model).__name__} of transformers {transformers.__version__} cannot be run in "
        f"stages: {why}; install another version of transformers"
    )
