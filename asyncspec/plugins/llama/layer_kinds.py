"""Which layers of a GGUF model are recurrent, by its metadata, and the size of their states."""

from __future__ import annotations

from asyncspec.plugins.llama.gguf_file import GGUF

_STATE_KEYS = ("ssm.", "shortconv.", "wkv.", "kda.")
"""Parts of the names of settings that only models with recurrent layers have."""

_BY_INTERVAL = frozenset({"qwen35", "qwen35moe", "qwen3next"})
"""Families in which every n-th layer is attention, unless the file says which."""

_LISTED = "{arch}.attention.recurrent_layers"

_STATE_ITEM = 4
"""States are float32."""


def has_states(model: GGUF) -> bool:
    """Whether a model has recurrent layers."""
    family = model.architecture
    return any(key.startswith(f"{family}.{part}") for key in model.metadata for part in _STATE_KEYS)


def recurrent_layers(model: GGUF, layers: int) -> list[bool]:
    """By layer, whether it has a state."""
    family = model.architecture
    if not has_states(model):
        return [False] * layers
    if family in _BY_INTERVAL:
        listed = model.get(_LISTED)
        if isinstance(listed, list):
            return [bool(kind) for kind in listed[:layers]]
        interval = model.number("{arch}.full_attention_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    heads = model.get("{arch}.attention.head_count_kv")
    if not isinstance(heads, list):
        return [True] * layers
    if not family.startswith("nemotron_h"):
        return [count == 0 for count in heads[:layers]]
    feed = model.get("{arch}.feed_forward_length")
    wide = feed if isinstance(feed, list) else [feed] * layers
    return [not count and not size for count, size in zip(heads[:layers], wide, strict=False)]


def by_layer(model: GGUF, key: str, layers: int) -> list[int]:
    """A setting of each layer; empty where the file does not say."""
    key = f"{{arch}}.{key}"
    match model.get(key):
        case None:
            return []
        case [*listed] if len(listed) >= layers and type(listed[0]) is int:
            return listed[:layers]
    return [model.number(key)] * layers


def kv_heads(model: GGUF, layers: int) -> list[int]:
    """Heads of keys and values of each layer; 0: it has no cache."""
    heads = by_layer(model, "attention.head_count_kv", layers) or by_layer(
        model, "attention.head_count", layers
    )
    if model.architecture not in _BY_INTERVAL:
        return heads or [0] * layers
    kinds = recurrent_layers(model, layers)
    return [0 if state else count for state, count in zip(kinds, heads, strict=True)]


def listed_layers(model: GGUF, kinds: list[bool]) -> dict[str, list[bool]]:
    """Metadata that says which layers of a part are recurrent, where their number would."""
    family = model.architecture
    return {_LISTED.format(arch=family): kinds} if family in _BY_INTERVAL else {}


def state_bytes(model: GGUF) -> int:
    """Bytes of a layer's state for a sequence, as llama.cpp keeps it."""
    width = model.number("{arch}.embedding_length")
    heads = model.get("{arch}.attention.head_count")
    head_count = max(heads) if isinstance(heads, list) else int(heads or 0)
    kernel = model.number("{arch}.ssm.conv_kernel", 0)
    if width_in_tokens := model.number("{arch}.shortconv.l_cache", 0):
        numbers = width * (width_in_tokens - 1)
    elif head := model.number("{arch}.wkv.head_size", 0):
        numbers = width * (head + model.number("{arch}.token_shift_count", 2))
    elif head := model.number("{arch}.kda.head_dim", 0):
        numbers = head_count * head * (3 * (kernel - 1 if kernel else 3) + head)
    else:
        inner = model.number("{arch}.ssm.inner_size", 0)
        state = model.number("{arch}.ssm.state_size", 0)
        groups = model.number("{arch}.ssm.group_count", 0)
        numbers = max(0, kernel - 1) * (inner + 2 * groups * state) + inner * state
    return _STATE_ITEM * numbers


def layer_output(family: str, layer: int) -> str:
    """llama.cpp's name of the hidden states after a layer."""
    return f"{'nemotron_h_block_out' if family.startswith('nemotron_h') else 'l_out'}-{layer}"
