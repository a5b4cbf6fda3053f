"""A contiguous block of a checkpoint's layers as a transformers model of its own.

transformers builds it from a configuration with fewer layers and from renumbered tensors, so each
family's own code runs (norms, scales, caps, rotary embeddings) and nothing but the block is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from asyncspec.backend.base import Mode, Quantize
from asyncspec.core.errors import CheckpointError, UserError, first_line
from asyncspec.core.jobs import Row
from asyncspec.plugins.hf.attention.attention import IMPLEMENTATION, TreeMask, register
from asyncspec.plugins.hf.attention.batched_attention import attention_of
from asyncspec.plugins.hf.attention.cache import (
    CacheShape,
    KVCache,
    check_quantized,
    path_kernel,
)
from asyncspec.plugins.hf.attention.experts import whole_rows
from asyncspec.plugins.hf.attention.latent import install_latent_attention
from asyncspec.plugins.hf.attention.layer_shapes import layer_shapes
from asyncspec.plugins.hf.attention.query_scale import install_query_scales
from asyncspec.plugins.hf.attention.recurrent_layers import install_recurrent_layers
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint
from asyncspec.plugins.hf.checkpoint.placeholders import NoRandomWeights
from asyncspec.plugins.hf.checkpoint.tensor_names import family_name, norm_name
from asyncspec.plugins.hf.kernels.accelerator.linear import DeviceLinear
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.elementwise import pad_elementwise
from asyncspec.plugins.hf.kernels.cpu.linear import AND, RowwiseLinear, pad_rows
from asyncspec.plugins.hf.kernels.cpu.ort import pack_waiting
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.kernels.probing import layers_with_all_kinds, noise, structure
from asyncspec.plugins.hf.kernels.process import light_imports, quiet_transformers
from asyncspec.plugins.hf.model.optimized.arrays import ArrayLayer
from asyncspec.plugins.hf.model.optimized.captured import Graphs, capture_layers
from asyncspec.plugins.hf.model.optimized.graphs import LayerGraph, fuse_layers
from asyncspec.plugins.hf.model.optimized.model import (
    OptimizedModel,
    call,
    is_hooked,
    optimize_model,
)
from asyncspec.plugins.hf.model.weights import (
    NORM_PREFIX,
    MatrixFormat,
    ShardTensors,
    cut_ends,
    load_matrices,
    read_shard_tensors,
    sub_config,
)

_PROBE_POSITIONS = (3, 4, 4, 5, 9, 12)
"""An even number: a fused layer may not take others."""

_MIN_PROBE_LAYERS = 4
"""Rounding differences of one layer become visible after a few more."""


class Shard:
    """Layers [first, last); the first shard has the embedding, the last one norm and head."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        first: int,
        last: int,
        dtype: torch.dtype,
        device: Device = CPU,
        *,
        quantized_cache: bool = False,
    ) -> None:
        self.model = model
        self.device = device
        self._quantized_cache = quantized_cache
        # Graphs of an accelerator's layers; None: they are not captured.
        self.graphs: Graphs | None = None
        self.layers = range(first, last)
        self.layer_shapes = layer_shapes(model)
        if quantized_cache:
            check_quantized(self.layer_shapes, checkpoint.path)
        self.path_kernel = path_kernel(self.layer_shapes, device, quantized=quantized_cache)
        self.has_embedding = first == 0
        self.has_head = last == checkpoint.info.layers
        self.info = checkpoint.info
        self.dtype = dtype
        # Graphs first: they do not pad rows themselves. Empty until all are loaded.
        self.linears: list[RowwiseLinear] = []
        # Whether layers are given as many rows as their products compute.
        self.pads_rows = False
        # Then their number is a multiple of this.
        self.whole_rows = 1
        # Whether logits are the head's product and nothing else, without the family's own code.
        self.has_plain_head = False
        # Number of first layers that self-tests run.
        self.probe_layers = last - first
        # Why its layers run in transformers' own code, in more operations; "" where they do not.
        self.unoptimized_reason = "not tried"

    def hidden(self, inputs: Tensor, positions: Tensor, tree: TreeMask) -> Tensor:
        """Tokens [n] (first shard) or hidden states [n, H], positions [n] -> states [n, H]."""
        body, rows = self.model.model, inputs.shape[0]
        if isinstance(body, OptimizedModel) and not (self.has_embedding or is_hooked(body)):
            hidden = body.states(*self._padded(inputs, positions), tree).squeeze(0)
        else:
            out = call(body, **self._inputs(inputs, positions, tree))
            hidden = out.last_hidden_state.squeeze(0)
        return hidden if hidden.shape[0] == rows else hidden.narrow(0, 0, rows)

    def logits(self, inputs: Tensor, positions: Tensor, tree: TreeMask, rows: Tensor) -> Tensor:
        """As ``hidden``, but logits [len(rows), vocab]: the head runs on these rows only."""
        if self.has_plain_head:
            hidden = self.hidden(inputs, positions, tree).index_select(0, rows)
            return cast("Tensor", self.model.lm_head.forward(hidden))
        count = len(rows)
        if getattr(self.model.config, "final_logit_softcapping", None):
            # The cap's tanh runs over [rows, vocab]: fill whole vectors (``elementwise.py``).
            while len(rows) * self.info.vocab_size % 64:
                rows = torch.cat([rows, rows[-1:]])
        out = self.model(**self._inputs(inputs, positions, tree), logits_to_keep=rows)
        return cast("Tensor", out.logits[0, :count])

    def _inputs(self, inputs: Tensor, positions: Tensor, tree: TreeMask) -> dict[str, Any]:
        name = "input_ids" if self.has_embedding else "inputs_embeds"
        named = zip((name, "position_ids"), self._padded(inputs, positions), strict=True)
        return {**dict(named), "use_cache": False, "tree": tree}

    def _padded(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[1, n, ...]; padded once here, so that no layer has to."""
        if self.pads_rows:
            rows = self.linears[0].computed_rows(inputs.shape[0])
            rows += -rows % self.whole_rows
            inputs, positions = pad_rows(inputs, rows), pad_rows(positions, rows)
        return inputs.unsqueeze(0), positions.unsqueeze(0)

    def probe_inputs(self, count: int) -> Tensor:
        """Random inputs of ``count`` rows."""
        if self.has_embedding:
            generator = torch.Generator().manual_seed(7)
            tokens = torch.randint(self.info.vocab_size, (count,), generator=generator)
            return self.device.put(tokens)
        return self.device.put(noise(count, self.info.hidden_size).to(self.dtype))

    def probe(self, tree: TreeMask, start: int = 0) -> Tensor:
        """A pass of random rows, at positions from ``start`` on, through all of the model but the
        head's matrix, to save time."""
        inputs, count = self.probe_inputs(len(_PROBE_POSITIONS)), len(_PROBE_POSITIONS)
        positions = self.device.integers([start + place for place in _PROBE_POSITIONS])
        if not self.has_head:
            return self.hidden(inputs, positions, tree)
        head, self.model.lm_head = self.model.lm_head, nn.Identity()
        try:
            return self.logits(inputs, positions, tree, self.device.integers(range(count)))
        finally:
            self.model.lm_head = head

    def probe_end(self, tree: TreeMask) -> Tensor:
        """As ``probe``, at the context's end, where Ministral 3 multiplies queries by more than 1.
        First layers show that as well as all."""
        start = self.info.context_length - 1 - _PROBE_POSITIONS[-1]
        with self.truncated():
            return self.probe(tree, max(0, start))

    def try_plain_head(self) -> None:
        """Set ``has_plain_head`` where that changes no bit of a pass of noise."""
        arguments = self.probe_inputs(len(_PROBE_POSITIONS)), self.device.integers(_PROBE_POSITIONS)
        rows, body = self.device.integers((1, 4)), self.model.model
        layers, body.layers = body.layers, nn.ModuleList()
        try:
            want = self.logits(*arguments, TreeMask(len(_PROBE_POSITIONS)), rows)
            self.has_plain_head = True
            got = self.logits(*arguments, TreeMask(len(_PROBE_POSITIONS)), rows)
            self.has_plain_head = torch.equal(got, want)
        finally:
            body.layers = layers

    @contextmanager
    def truncated(self) -> Iterator[None]:
        """Inside, passes go through ``probe_layers`` layers only."""
        body = self.model.model
        layers = body.layers
        body.layers = layers[: self.probe_layers]
        try:
            yield
        finally:
            body.layers = layers

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        rest: int = sum(x.numel() * x.element_size() for x in self.model.parameters())
        return rest + sum(linear.bytes_held for linear in self.linears)

    def describe(self) -> str:
        """How matrices of layers and head are kept, and why layers are not optimized."""
        head, why = self.model.lm_head, self.unoptimized_reason
        ways = (x.description.split(AND) for x in self.linears if x is not head)
        weights = AND.join(sorted(set(chain(*ways))))
        if self.has_head and head.description != weights:
            weights += f", head {head.description}"
        if self.device.is_accelerator:
            weights += f" on {self.device.description}"
            if self.device.kernel_failure:
                weights += f", without Triton ({self.device.kernel_failure})"
        return f"{weights}, layers by transformers' own code ({why})" if why else weights

    def pad_to(self, buckets: tuple[int, ...]) -> None:
        """On an accelerator, have passes padded to these numbers of rows, and captured."""
        for linear in self.linears:
            if isinstance(linear, DeviceLinear):
                linear.buckets = buckets
        if self.graphs is not None:
            self.graphs.buckets = buckets

    def warm_up(self) -> None:
        """Compile kernels and capture the graphs of all numbers of rows, which takes longer than
        many passes."""
        if self.graphs is None or self.path_kernel is None:
            return
        for count in self.graphs.buckets:
            cache = KVCache(self.cache_shape("fast"), count, self.device)
            rows = [Row(slot, 0, (slot,)) for slot in range(count)]
            tree = attention_of([(cache, 0, rows)])
            self.hidden(self.probe_inputs(count), tree.positions, tree)

    def cache_shape(self, mode: Mode) -> CacheShape:
        """What a slot of this shard's cache holds."""
        exact = mode == "exact" and self.path_kernel is None
        return CacheShape(self.layer_shapes, self.dtype, exact, self._quantized_cache)


def load_shard(
    checkpoint: Checkpoint,
    first: int,
    last: int,
    dtype: torch.dtype,
    mode: Mode,
    settings: KernelSettings,
    *,
    quantize: Quantize = "none",
    share_tied: bool = True,
    quantized_cache: bool = False,
    device: Device = CPU,
) -> Shard:
    """Read layers [first, last) and pack or quantise them, one matrix after another.
    ``share_tied``: a tied matrix is held once; else the head gets a packed copy, which is faster.

    Raises ``UserError`` for a range the model does not have, ``CheckpointError`` where tensors are
    missing or do not fit the configuration."""
    total = checkpoint.info.layers
    if not 0 <= first < last <= total:
        raise UserError(f"layers [{first}, {last}) of a model of {total} layers cannot be a stage")
    register()
    tensors = read_shard_tensors(checkpoint, first, last, dtype)
    with NoRandomWeights():
        model = _build(checkpoint, first, last, dtype, tensors)
        if last - first < total:
            _check_cut(checkpoint, model, first)
        cut_ends(model, embedding=first == 0, head=last == total)
    where = (first, last, dtype, device)
    shard = Shard(model, checkpoint, *where, quantized_cache=quantized_cache)
    load_matrices(model, tensors, MatrixFormat(dtype, settings, quantize, share_tied, device))
    device.place(model)
    install_recurrent_layers(model, device)
    install_latent_attention(model, device)
    install_query_scales(model)
    if mode == "exact" and device.torch.type == "cpu":
        pad_elementwise(model)
        shard.whole_rows = whole_rows(model)
    if first:
        _check_input(checkpoint, shard)
    shard.probe_layers = max(_MIN_PROBE_LAYERS, layers_with_all_kinds(model.model.layers))
    shard.unoptimized_reason = optimize_model(
        model, (shard.probe, shard.probe_end), len(_PROBE_POSITIONS), shard.layer_shapes
    )
    if device.is_accelerator and not shard.unoptimized_reason:
        shard.graphs = capture_layers(model.model, device)
    elif not shard.unoptimized_reason:
        positions = torch.tensor(_PROBE_POSITIONS)
        fuse_layers(model.model, shard.info.hidden_size, dtype, positions)
    pack_waiting(model)
    linears = (x for x in model.modules() if isinstance(x, RowwiseLinear))
    shard.linears = sorted(linears, key=lambda x: not isinstance(x, LayerGraph))
    are_arrays = (isinstance(layer, ArrayLayer) for layer in model.model.layers)
    shard.pads_rows = bool(shard.linears) and not all(are_arrays)
    shard.pad_to(settings.buckets)
    if shard.has_head and not shard.unoptimized_reason:
        shard.try_plain_head()
    return shard


def _check_cut(checkpoint: Checkpoint, model: Any, first: int) -> None:
    """Raise ``CheckpointError`` where the layers of a shard, numbered from 0, are not those of the
    whole model: families choose a layer's kind by its number in many ways (``sub_config``)."""
    with torch.device("meta"):
        whole = model_class(checkpoint.info.architecture)(checkpoint.config)
    for i, layer in enumerate(model.model.layers, start=first):
        if structure(layer) != structure(whole.model.layers[i]):
            name = checkpoint.info.architecture
            raise CheckpointError(
                f"{checkpoint.path} cannot be cut before layer {first}: layer {i} of a {name} is "
                "of another kind there; run it in one stage"
            )


def _check_input(checkpoint: Checkpoint, shard: Shard) -> None:
    """Raise ``CheckpointError`` where a model does more with its input than hand it to the first
    layer, such as to normalise it: that would be done in every stage."""
    body = shard.model.model
    layers, body.layers = body.layers, nn.ModuleList()
    inputs = shard.probe_inputs(len(_PROBE_POSITIONS))
    try:
        tree = TreeMask(len(inputs))
        positions = shard.device.integers(_PROBE_POSITIONS)
        want, got = getattr(body, norm_name(body))(inputs), shard.hidden(inputs, positions, tree)
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint.info.architecture} cannot be cut: {first_line(error)}"
        ) from error
    finally:
        body.layers = layers
    if not torch.equal(want, got):
        raise CheckpointError(
            f"{checkpoint.info.architecture} cannot be cut: it changes its first layer's input"
        )


def model_class(name: str) -> Any:
    """transformers' class ``name``. The first call takes seconds: it imports the class's module."""
    import transformers

    model_type = getattr(transformers, name, None)
    if model_type is None:
        raise CheckpointError(f"this transformers has no {name}; install another version")
    return model_type


def make_conversions() -> None:
    """Have transformers compile its thousand patterns of tensor names, which it keeps; else the
    first model of each process waits for it (.1 s)."""
    with suppress(ImportError):  # a name of its own that may change
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


def _build(
    checkpoint: Checkpoint, first: int, last: int, dtype: torch.dtype, tensors: ShardTensors
) -> Any:
    """The shard's model, its matrices still placeholders."""
    total = checkpoint.info.layers
    cls = model_class(checkpoint.info.architecture)
    config = sub_config(checkpoint.config, first, last)
    config.tie_word_embeddings = tensors.tied
    quiet_transformers()
    try:
        with light_imports():
            model, info = cls.from_pretrained(
                None,
                config=config,
                state_dict=tensors.state,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                output_loading_info=True,
                # They are reported below, by name.
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # invalid settings may fail in any way
        raise CheckpointError(f"{checkpoint.path} does not load: {first_line(error)}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        # A mismatched one comes with both shapes.
        keys = sorted(x if isinstance(x, str) else x[0] for x in info.get(problem, ()))
        # Keys of the last norm beside its weight: ``cut_ends`` removes it where there is no head.
        norm = family_name(checkpoint.info.architecture, NORM_PREFIX)
        keys = [key for key in keys if last == total or not key.startswith(norm)]
        if keys:
            kind = problem.removesuffix("_keys")
            raise CheckpointError(
                f"{checkpoint.path} has {kind} tensors ({keys[0]}, {len(keys)} in all); "
                "its weights do not fit its config.json"
            )
    model.eval().requires_grad_(requires_grad=False)
    return model
