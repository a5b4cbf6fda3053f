"""A contiguous block of a checkpoint's layers as a transformers model of its own.

transformers builds it from a configuration with fewer layers and from renumbered tensors, so a
family's own code runs (norms, scales, caps, rotary embeddings) and nothing but the block is read.
Driving the layers by hand would break with every second release of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from asyncspec.backend.base import Mode, Quantize
from asyncspec.backend.hf.attention import NAME, Tree, register
from asyncspec.backend.hf.cache import Shape, shape_of
from asyncspec.backend.hf.checkpoint import Checkpoint
from asyncspec.backend.hf.experts import open_experts
from asyncspec.backend.hf.kernels.cpu.capabilities import Recipe
from asyncspec.backend.hf.kernels.cpu.elementwise import swap_elementwise
from asyncspec.backend.hf.kernels.cpu.linear import RowwiseLinear, with_rows
from asyncspec.backend.hf.kernels.cpu.mapped import pack_mapped
from asyncspec.backend.hf.optimized.graphs import Half, fuse
from asyncspec.backend.hf.optimized.layers import make_lean
from asyncspec.backend.hf.probing import fewest_of_all_kinds, noise, noise_tokens
from asyncspec.backend.hf.process import quiet_transformers
from asyncspec.backend.hf.weights import Pieces, Wanted, fill, read_pieces, sub_config
from asyncspec.core.errors import CheckpointError, UserError, first_line

_POSITIONS = (3, 4, 4, 5, 9)
"""Of rows that a loaded shard is tried with."""

_FEWEST = 4
"""Layers that a shard is tried with: what one of them rounds otherwise, few more make visible."""


class Shard:
    """Layers [first, last) of a model; the first shard embeds, the last has norm and head."""

    def __init__(
        self, model: Any, checkpoint: Checkpoint, first: int, last: int, dtype: torch.dtype
    ) -> None:
        self.model = model
        self.layers = range(first, last)
        self.embeds = first == 0
        self.judges = last == checkpoint.info.layers
        self.info = checkpoint.info
        self.dtype = dtype
        # What multiplies; filled by ``load_shard``.
        self.linears: tuple[RowwiseLinear, ...] = ()
        # Of those the one by whose floor a pass has its rows.
        self._first: RowwiseLinear | None = None
        # So many of the first layers are enough to try it with; set by ``load_shard``.
        self.telling = last - first
        # Why its layers are run by the family's own code, which takes longer; "" where they are
        # not (lean/). Set by ``load_shard``.
        self.not_lean = "not tried"

    def use(self, linears: Iterable[RowwiseLinear]) -> None:
        """These are the shard's products."""
        self.linears = tuple(linears)
        # Halves of layers take rows as they come; other products see to their floor themselves.
        halves = (linear for linear in self.linears if isinstance(linear, Half))
        self._first = next(halves, self.linears[0])

    def hidden(self, inputs: torch.Tensor, positions: torch.Tensor, tree: Tree) -> torch.Tensor:
        """inputs: tokens [n] on the first shard, else hidden states [n, H]; positions [n].
        Returns hidden states [n, H]."""
        out = self.model.model(**self._inputs(inputs, positions, tree))
        return cast("torch.Tensor", out.last_hidden_state[0, : len(inputs)])

    def logits(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        tree: Tree,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """As ``hidden``, but the logits [len(rows), vocab] of some rows, by the family's own
        code. The head runs on those rows only."""
        count = len(rows)
        if getattr(self.model.config, "final_logit_softcapping", None):
            # The cap's tanh runs over [rows, vocab] as one vector: keep it whole (elementwise.py).
            while len(rows) * self.info.vocab_size % 64:
                rows = torch.cat([rows, rows[-1:]])
        out = self.model(**self._inputs(inputs, positions, tree), logits_to_keep=rows)
        return cast("torch.Tensor", out.logits[0, :count])

    def _inputs(self, inputs: torch.Tensor, positions: torch.Tensor, tree: Tree) -> dict[str, Any]:
        # Once for all layers, so that none has to (``RowwiseLinear.padded``).
        rows = self._padded(len(inputs))
        name = "input_ids" if self.embeds else "inputs_embeds"
        return {
            name: with_rows(inputs, rows).unsqueeze(0),
            "position_ids": with_rows(positions, rows).unsqueeze(0),
            "use_cache": False,
            "tree": tree,
        }

    def _padded(self, rows: int) -> int:
        """Rows that the layers' products take as they are, where ``rows`` are asked for."""
        return rows if self._first is None else self._first.padded(rows)

    def noise(self, count: int) -> torch.Tensor:
        """Inputs of that many rows, to try this shard with."""
        if self.embeds:
            return noise_tokens(count, self.info.vocab_size)
        return noise(count, self.info.hidden_size).to(self.dtype)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, passes go through a few first layers with one of each kind among them: a stage
        of many layers is tried in the time that those take."""
        body = self.model.model
        whole = body.layers
        body.layers = whole[: self.telling]
        try:
            yield
        finally:
            body.layers = whole

    def outline(self) -> Callable[[Tree], torch.Tensor]:
        """A pass of noise at ``_POSITIONS`` over a given tree, through all of the family's code
        that this shard runs, but not through the head's matrix, of which reading takes long."""
        inputs, positions = self.noise(len(_POSITIONS)), torch.tensor(_POSITIONS)
        rows = torch.arange(len(_POSITIONS))

        def run(tree: Tree) -> torch.Tensor:
            if not self.judges:
                return self.hidden(inputs, positions, tree)
            head = self.model.lm_head
            self.model.lm_head = nn.Identity()
            try:
                return self.logits(inputs, positions, tree, rows)
            finally:
                self.model.lm_head = head

        return run

    @property
    def lean(self) -> bool:
        """Whether the layers run in fewer operations than by the family's own code."""
        return not self.not_lean

    @property
    def weight_bytes(self) -> int:
        """Memory of everything this shard holds of the model."""
        rest: int = sum(x.numel() * x.element_size() for x in self.model.parameters())
        return rest + sum(linear.bytes_held for linear in self.linears)

    def weights_in_words(self) -> str:
        """How the matrices of this shard's layers and head are kept."""
        head = self.model.lm_head
        layers = " and ".join(sorted({x.words for x in self.linears if x is not head}))
        same = not self.judges or head.words == layers
        return layers if same else f"{layers}, head {head.words}"

    def in_words(self) -> str:
        """What a user should know of this shard."""
        words = self.weights_in_words()
        # A release of transformers may compute something else; passes take longer then.
        return (
            words if self.lean else f"{words}, layers by transformers' own code ({self.not_lean})"
        )

    def cache_shape(self, mode: Mode) -> Shape:
        """What a slot of this shard's cache holds."""
        return shape_of(self.model.config, len(self.layers), self.dtype, mode)


def load_shard(
    checkpoint: Checkpoint,
    first: int,
    last: int,
    dtype: torch.dtype,
    mode: Mode,
    recipe: Recipe,
    *,
    quantize: Quantize = "none",
    share_tied: bool = True,
) -> Shard:
    """Read layers [first, last) and pack or quantise them, one matrix after another.

    ``share_tied``: where one shard embeds and judges with one matrix, it holds it once; else the
    head gets a packed copy, which is quicker.

    Raises ``UserError`` for a range the model does not have, ``CheckpointError`` where tensors
    are missing or do not fit the configuration.
    """
    total = checkpoint.info.layers
    if not 0 <= first < last <= total:
        raise UserError(f"layers [{first}, {last}) of a model of {total} layers cannot be a stage")
    register()
    pieces = read_pieces(checkpoint, first, last, dtype)
    shard = Shard(_build(checkpoint, first, last, dtype, pieces), checkpoint, first, last, dtype)
    inner = shard.model.model
    if not shard.embeds:
        # The head may be tied to it, and then has it read for itself.
        inner.embed_tokens = nn.Identity()
    if not shard.judges:
        inner.norm = nn.Identity()
        shard.model.lm_head = nn.Identity()
    open_experts(shard.model)
    fill(shard.model, pieces, Wanted(dtype, recipe, quantize, share_tied))
    if mode == "exact":
        swap_elementwise(shard.model)
    shard.telling = max(_FEWEST, fewest_of_all_kinds(inner.layers))
    shard.not_lean = make_lean(shard.model, shard.outline(), len(_POSITIONS))
    if shard.lean:
        fuse(shard.model.model, shard.info.hidden_size, torch.tensor(_POSITIONS))
    pack_mapped(shard.model)
    shard.use(x for x in shard.model.modules() if isinstance(x, RowwiseLinear))
    return shard


def model_class(name: str) -> Any:
    """transformers' class of that name. Asked for first, it takes seconds: transformers imports
    what it is made of only then."""
    import transformers

    found = getattr(transformers, name, None)
    if found is None:
        raise CheckpointError(f"this transformers has no {name}; install another version")
    return found


def _build(
    checkpoint: Checkpoint, first: int, last: int, dtype: torch.dtype, pieces: Pieces
) -> Any:
    """The shard's model, its matrices still placeholders."""
    cls = model_class(checkpoint.info.architecture)
    config = sub_config(checkpoint.config, first, last)
    config.tie_word_embeddings = pieces.tied
    with quiet_transformers():
        try:
            model, info = cls.from_pretrained(
                None,
                config=config,
                state_dict=pieces.state,
                dtype=dtype,
                attn_implementation=NAME,
                output_loading_info=True,
                # They are told below, by name.
                ignore_mismatched_sizes=True,
            )
        except Exception as error:  # a setting that makes no sense may fail in any way
            raise CheckpointError(
                f"{checkpoint.path} does not load: {first_line(error)}"
            ) from error
    for problem in ("missing_keys", "mismatched_keys"):
        # A mismatched one comes with both shapes.
        keys = sorted(x if isinstance(x, str) else x[0] for x in info.get(problem, ()))
        if keys:
            kind = problem.removesuffix("_keys")
            raise CheckpointError(
                f"{checkpoint.path} has {kind} tensors ({keys[0]}, {len(keys)} in all); "
                "its weights do not fit its config.json"
            )
    model.eval().requires_grad_(requires_grad=False)
    return model
