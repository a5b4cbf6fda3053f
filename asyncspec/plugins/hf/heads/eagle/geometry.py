"""A published EAGLE head and its target: the sizes that settings, tensors and target give together,
and whether the head was made for this target. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from asyncspec.backend.base import ModelInfo
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files.headers import HEAD, INDEX, SINGLE, list_tensors
from asyncspec.plugins.hf.checkpoint.files.hub import locate
from asyncspec.plugins.hf.checkpoint.model_config import scaling_kind
from asyncspec.plugins.hf.heads.eagle.description import (
    BlockShape,
    FeatureNorm,
    Features,
    HeadDescription,
    Kind,
    ParallelShape,
    Shapes,
    check_shapes,
    layer,
)
from asyncspec.plugins.hf.heads.eagle.layouts import Published, Settings, read_published, wrong


def describe(
    directory: Path, stored: Shapes, target: ModelInfo
) -> tuple[HeadDescription, dict[str, str]]:
    """A head made for ``target``, and where its tensors are: name in this program -> stored name.
    ``stored``: shapes by stored name.

    Raises ``CheckpointError`` with the tensor, shape or setting that is wrong.
    """
    published = read_published(directory)
    used = [one for one in published.prefixes if any(one[0] in name for name in stored)]
    published = replace(published, prefixes=tuple(used))
    names = {published.plain_name(name): name for name in stored}
    _check_names(names, stored, directory)
    # EAGLE-3 has a norm on its feature; without it the configuration may still say so.
    third = bool(used) or any(name.endswith("hidden_norm.weight") for name in stored)
    kind: Kind = published.kind or ("EAGLE-3" if third else "EAGLE")
    names = {plain: name for plain, name in names.items() if not _unused(plain, kind)}
    shapes = {plain: stored[name] for plain, name in names.items()}
    head = _completed(published, kind, shapes, target, directory)
    check_shapes(head, shapes, published.stored_name, directory)
    return head, names


def _check_names(names: Mapping[str, str], stored: Shapes, where: Path) -> None:
    """Raise ``CheckpointError`` for layers of another kind, which settings do not tell: many of
    them are copies of the target's."""
    if len(names) < len(stored):
        twice = min(stored.keys() - names.values())
        raise CheckpointError(f"the EAGLE head {where} has {twice} twice; download it again")
    for part, kind in _OTHER_LAYERS.items():
        if any(part in name for name in names):
            raise CheckpointError(f"the EAGLE head {where} has {kind}, which is not supported")


_OTHER_LAYERS = {".kv_a_proj_with_mqa.": "latent attention (MLA)", ".mlp.experts.": "experts"}
"""By a part of their tensors' names."""


def _check_target(
    published: Published, kind: Kind | Literal[""], target: ModelInfo, where: Path
) -> None:
    """Raise ``CheckpointError`` for a head of another target, as far as its settings tell."""
    settings = published.settings
    reads = settings.hidden_size
    if kind != "EAGLE":
        reads = settings.target_hidden_size or reads
    families = {one.partition("For")[0] for one in published.architectures}
    named = f" ({published.verifier})" if published.verifier else ""
    for what, size, targets in (
        ("hidden size", reads, target.hidden_size),
        ("vocabulary", settings.vocab_size or target.vocab_size, target.vocab_size),
    ):
        if size != targets:
            raise CheckpointError(
                f"the EAGLE head {where} was made for a target with a {what} of {size}{named}, but "
                f"the target's is {targets}; use the head of this very target"
            )
    family, is_class, _ = target.architecture.partition("For")
    # A GGUF target's is llama.cpp's name, which stands for several.
    if families and is_class and family not in families:
        theirs = ", ".join(published.architectures)
        raise CheckpointError(
            f"the EAGLE head {where} was made for a {theirs}{named}, but the target is a "
            f"{target.architecture}; use the head of this very target"
        )


def _completed(
    published: Published, kind: Kind, shapes: Shapes, target: ModelInfo, where: Path
) -> HeadDescription:
    """With all sizes. Raises ``CheckpointError`` for a head of another target."""
    _check_target(published, kind, target, where)
    settings, third = published.settings, kind == "EAGLE-3"
    features = Features((), target.hidden_size)
    block = _block(settings, target, where) if kind == "DFlash" else None
    if block or third:
        read = _block_depths if block else _depths
        depths = read(settings, shapes.get("fc.weight", (0, 0))[-1], target, where)
        features = Features(depths, target.hidden_size * len(depths))
    elif settings.norm_before_fc or settings.fc_norm or settings.norm_output:
        raise wrong(where, "its norms are those of EAGLE-3, its tensors are not; download it again")
    heads = settings.num_attention_heads
    kv_heads = settings.num_key_value_heads or heads
    if heads % kv_heads:
        raise wrong(where, f"{kv_heads} key-value heads do not divide {heads} heads")
    # Left out, the width of a head is what queries and output projection agree on, or the usual.
    attention = f"{layer(0)}self_attn."
    queries = shapes.get(f"{attention}q_proj.weight", (0,))[0]
    outputs = shapes.get(f"{attention}o_proj.weight", (0,))[-1]
    agreed = queries // heads if queries == outputs else 0
    head_dim = settings.head_dim or agreed or settings.hidden_size // heads or 1
    rotary_dim = int(head_dim * settings.partial_rotary_factor)
    if rotary_dim % 2 or not rotary_dim:
        raise wrong(where, f"{rotary_dim} columns cannot be rotated; expected an even number")
    norm: FeatureNorm = "each" if settings.fc_norm else "none"
    return HeadDescription(
        kind=kind,
        features=features,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=settings.num_hidden_layers,
        vocab_size=target.vocab_size,
        draft_vocab_size=(settings.draft_vocab_size if third or block else 0) or target.vocab_size,
        rms_norm_eps=settings.rms_norm_eps,
        hidden_act=settings.hidden_act,
        rope_parameters=_rope(settings),
        rotary_dim=rotary_dim,
        max_position_embeddings=settings.max_position_embeddings,
        # The files know better than the configurations, which often say nothing.
        fc_bias="fc.bias" in shapes or (not third and settings.bias),
        qkv_bias=f"{attention}q_proj.bias" in shapes
        or settings.qkv_bias
        or settings.attention_bias,
        mlp_bias=f"{layer(0)}mlp.up_proj.bias" in shapes or settings.mlp_bias,
        qk_norm=f"{attention}q_norm.weight" in shapes or published.qk_norm,
        feature_norm="together" if settings.norm_before_fc else norm,
        norm_before_residual=settings.norm_before_residual,
        norm_output=settings.norm_output,
        block=block,
        parallel=_parallel(settings, target, where) if settings.parallel_tokens else None,
        verifier=published.verifier,
    )


def _parallel(settings: Settings, target: ModelInfo, where: Path) -> ParallelShape:
    """Raises ``CheckpointError``."""
    return ParallelShape(settings.parallel_tokens, _mask_token(settings, target, where))


def _mask_token(settings: Settings, target: ModelInfo, where: Path) -> int:
    """Raises ``CheckpointError`` where it is none of the target's tokens."""
    mask = settings.mask_token_id
    if mask is None or mask >= target.vocab_size:
        raise wrong(where, f"mask_token_id is {mask}, expected a token below {target.vocab_size}")
    return mask


def _block(settings: Settings, target: ModelInfo, where: Path) -> BlockShape:
    """Raises ``CheckpointError`` for settings of a DFlash head that make no sense."""
    layers = settings.num_hidden_layers
    if settings.block_size < 2:
        raise wrong(where, f"block_size is {settings.block_size}, expected at least 2")
    types = settings.layer_types[:layers] or ("full_attention",) * layers
    if len(types) < layers or set(types) - {"full_attention", "sliding_attention"}:
        raise wrong(
            where, f"layer_types is {[*types]}, expected full or sliding of {layers} layers"
        )
    if "sliding_attention" in types and not settings.sliding_window:
        raise wrong(where, "layer_types names sliding layers, but there is no sliding_window")
    rank = settings.markov_rank
    inputs = settings.hidden_size + (rank if settings.confidence_head_with_markov else 0)
    return BlockShape(
        rows=settings.block_size,
        mask_token=_mask_token(settings, target, where),
        from_anchor=settings.sample_from_anchor,
        windows=tuple(
            settings.sliding_window if kind == "sliding_attention" else 0 for kind in types
        ),
        causal=not settings.sliding_window_non_causal,
        markov=settings.markov_head_type if rank else "",
        markov_rank=rank,
        confidence_inputs=inputs if settings.enable_confidence_head else 0,
    )


def _block_depths(
    settings: Settings, fc_columns: int, target: ModelInfo, where: Path
) -> tuple[int, ...]:
    """The depths a DFlash head for ``target`` was trained on. Raises ``CheckpointError``."""
    layers = target.layers
    if settings.target_layer_ids:
        # z-lab counts layers whose output is read; that of the last would be normed.
        depths, last = tuple(one + 1 for one in settings.target_layer_ids), layers - 1
    else:
        depths, last = settings.aux_hidden_state_layer_ids, layers
        depths = depths or (2, layers // 2, layers - 3)
        if depths[-1] == layers and fc_columns == (len(depths) - 1) * target.hidden_size:
            # As in ``_depths``.
            depths = depths[:-1]
    if list(depths) != sorted(set(depths)) or not 0 <= depths[0] <= depths[-1] <= last:
        raise wrong(
            where,
            f"it reads the target after layers {[*depths]}; expected ascending, at most {last}",
        )
    return depths


def _rope(settings: Settings) -> dict[str, Any]:
    """In transformers' words, without what is said elsewhere or concerns pictures."""
    parameters = settings.rope_parameters or settings.rope_scaling
    left_out = ("type", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
    rope = {key: value for key, value in parameters.items() if key not in left_out}
    return rope | {"rope_type": scaling_kind(parameters), "rope_theta": settings.rope_theta}


def _depths(settings: Settings, fc_columns: int, target: ModelInfo, where: Path) -> tuple[int, ...]:
    """The depths an EAGLE-3 head for ``target`` was trained on. Raises ``CheckpointError`` where
    they do not exist in this target."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids, layers = settings.eagle_aux_hidden_state_layer_ids, target.layers
    if list(ids) != sorted(set(ids)):
        raise wrong(where, f"{name} is {[*ids]}, expected ascending layer numbers")
    if ids and ids[-1] == layers and fc_columns == (len(ids) - 1) * target.hidden_size:
        # Some versions of speculators also list what they trained the head to predict.
        ids = ids[:-1]
    depths = ids or (2, layers // 2, layers - 3)
    if list(depths) != sorted(set(depths)):
        raise wrong(
            where,
            f"EAGLE-3 reads a target after layers 2, n/2 and n-3; {layers} layers are too few",
        )
    # Heads give either the layers whose output is read, or those whose input is. No head reads the
    # embedding, so a list that starts with 1 is the former.
    if ids and ids[0] == 1:
        depths = tuple(depth + 1 for depth in depths)
    if not 0 <= depths[0] <= depths[-1] <= layers:
        raise wrong(where, f"{name} is {[*ids]}, but the target has {layers} layers")
    return depths


def _unused(name: str, kind: Kind) -> bool:
    """RoPE is computed, EAGLE-1/2 uses the target's own head, and training compares with it."""
    if name.endswith("inv_freq") or name.startswith("verifier_"):
        return True
    return name == HEAD and kind == "EAGLE"


def check_head(name: str | Path, target: ModelInfo) -> Path:
    """The directory of a head made for ``target``, as far as can be checked without torch: of
    pickled weights only that they are there. Raises ``CheckpointError``."""
    directory = locate(name, pickled=True)
    if pickled(directory):
        published = read_published(directory)
        _check_target(published, published.kind, target, directory)
    else:
        stored = {name: info.shape for name, info in list_tensors(directory).items()}
        describe(directory, stored, target)
    return directory


def pickled(directory: Path) -> list[Path]:
    """The files of a head that is stored as ``pytorch_model*.bin`` and in no better way."""
    if any((directory / name).is_file() for name in (SINGLE, INDEX)):
        return []
    return sorted(directory.glob("pytorch_model*.bin"))
