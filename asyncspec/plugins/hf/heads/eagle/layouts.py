"""Readers of published EAGLE heads: what a ``config.json`` and the names of tensors say, in this
program's words. One reader for each layout; no torch.

*Original*: EAGLE's own code, SpecForge, vLLM and Model Optimizer. Settings are flat, some of them
in ``eagle_config``; the only layer is ``midlayer``, or layers are numbered.
*Speculators*: settings of the layers are in ``transformer_layer_config``; ``verifier`` names the
target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from asyncspec.core.errors import CheckpointError, InputProblem
from asyncspec.plugins.hf.checkpoint.formats.settings import SETTINGS
from asyncspec.plugins.hf.checkpoint.model_config import FIXED_ROPE, read_config, scaling_kind
from asyncspec.plugins.hf.heads.eagle.description import Kind, layer

Config = Mapping[str, Any]
Size = Annotated[int, Meta(gt=0)]
Real = Annotated[float, Meta(gt=0)]


class Settings(Struct, frozen=True):
    """Settings of ``config.json``; 0 where it leaves a size to the tensors or the target."""

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size = 0
    head_dim: Size = 0
    num_hidden_layers: Annotated[int, Meta(gt=0, le=128)] = 1
    vocab_size: Size = 0
    draft_vocab_size: Size = 0
    target_hidden_size: Size = 0
    max_position_embeddings: Size = 2048
    rms_norm_eps: Real = 1e-6
    hidden_act: str = "silu"
    # The default is that of the code the first heads were published with.
    rope_theta: Real = 10_000.0
    # transformers' ``rope_parameters``, in older files ``rope_scaling``.
    rope_parameters: dict[str, Any] = {}
    rope_scaling: dict[str, Any] = {}
    partial_rotary_factor: Annotated[float, Meta(gt=0, le=1)] = 1.0
    bias: bool = False
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = ()
    # Tokens of a block (DFlash, DSpark).
    block_size: Annotated[int, Meta(ge=0, le=256)] = 0
    mask_token_id: Annotated[int, Meta(ge=0)] | None = None
    aux_hidden_state_layer_ids: tuple[int, ...] = ()
    target_layer_ids: tuple[int, ...] = ()
    layer_types: tuple[str, ...] = ()
    sliding_window: Annotated[int, Meta(ge=0)] = 0
    sliding_window_non_causal: bool = False
    sample_from_anchor: bool = False
    markov_rank: Annotated[int, Meta(ge=0)] = 0
    markov_head_type: Literal["vanilla", "gated"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    # Tokens proposed in one pass (P-EAGLE); 0 for other heads.
    parallel_tokens: Annotated[int, Meta(ge=0, le=256)] = 0


class Published(Struct, frozen=True):
    """What a layout's reader makes of ``config.json``."""

    settings: Settings
    # "": the tensors say it.
    kind: Kind | Literal[""] = ""
    # Prefixes of the file's names, and those of this program's in their place.
    prefixes: tuple[tuple[str, str], ...] = ()
    # Whether queries and keys are normed in any case; else the tensors say it.
    qk_norm: bool = False
    # The target it was trained for: its name, and architectures. Empty where it is not said.
    verifier: str = ""
    architectures: tuple[str, ...] = ()

    def plain_name(self, stored: str) -> str:
        """This program's name of a tensor in the file."""
        name = stored.removeprefix("model.")
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def stored_name(self, plain: str) -> str:
        """What the layout calls a tensor."""
        for theirs, ours in self.prefixes:
            if plain.startswith(ours):
                return theirs + plain.removeprefix(ours)
        return plain


def read_published(directory: Path) -> Published:
    """Raises ``CheckpointError`` for settings that make no sense or are not supported."""
    # null counts as left out.
    config = {key: value for key, value in read_config(directory).items() if value is not None}
    try:
        return _reader(config)(config)
    except msgspec.ValidationError as error:
        raise wrong(directory, InputProblem.of(error).sentence("setting")) from error
    except _Unsupported as error:
        raise wrong(directory, str(error)) from error


def _reader(config: Config) -> Callable[[Config], Published]:
    """The layout's. Raises ``_Unsupported``."""
    if "speculators_model_type" in config:
        return _speculators
    is_dflash = "dflash_config" in config or "DFlashDraftModel" in _names(config, "architectures")
    return _dflash if is_dflash else _original


class _Unsupported(Exception):
    """Why a head of this layout cannot be used."""


def wrong(directory: Path, problem: str) -> CheckpointError:
    """A setting that is wrong."""
    return CheckpointError(f"config.json of the EAGLE head {directory}: {problem}")


def _original(config: Config) -> Published:
    nested = _objects(config, "eagle_config")
    settings = {**config, **nested}
    for name, supported in _VARIANTS.items():
        if (value := settings.get(name, supported)) != supported:
            raise _Unsupported(f"{name} is {value}; only heads with {supported} are supported")
    # Other programs' names of the same settings.
    for name, meaning in (("use_aux_norm", "fc_norm"), ("return_hidden_post_norm", "norm_output")):
        settings[meaning] = settings.get(meaning, settings.get(name, False))
    third = any("eagle3" in name.lower() for name in _names(settings, "architectures"))
    return Published(
        _settings(settings),
        kind="EAGLE-3" if third else "",
        prefixes=(("midlayer.", layer(0)),),
    )


_VARIANTS: Mapping[str, object] = {
    # Reads the final hidden state in place of several depths.
    "use_aux_hidden_state": True,
    # Every layer reads the token, not only the first.
    "next_layer_regular": True,
    "eh_proj_before_attn": False,
    "use_mtp_layernorm": False,
    # Several tokens in one pass (P-EAGLE, Medusa).
    "parallel_draft_step": 1,
}
"""Settings of heads that compute something else, and what they are of the others."""


def _dflash(config: Config) -> Published:
    """z-lab's own layout of DFlash."""
    settings = {**config, **_objects(config, "dflash_config")}
    if set(_names(settings, "layer_types")) - {"full_attention"}:
        raise _Unsupported("only full attention is supported in this layout")
    if not settings.get("target_layer_ids"):
        raise _Unsupported("dflash_config has no target_layer_ids; download it again")
    return Published(_settings(settings), kind="DFlash", qk_norm=True)


def _speculators(config: Config) -> Published:
    kinds: dict[str, Kind] = {
        "eagle": "EAGLE",
        "eagle3": "EAGLE-3",
        "peagle": "EAGLE-3",
        "dflash": "DFlash",
        "dspark": "DFlash",
    }
    name = str(config["speculators_model_type"])
    if name not in kinds:
        raise _Unsupported(
            f"speculators_model_type {name!r} is not supported; use a head of type "
            f"{', '.join(kinds)}"
        )
    if config.get("layernorms"):
        raise _Unsupported("layernorms is not supported; use a head without it")
    inner = _objects(config, "transformer_layer_config")
    family = inner.get("model_type", "llama")
    if kinds[name] == "DFlash":
        # Its layers are Qwen3's, whatever model_type their settings were copied of.
        inner, family = {"block_size": 8, **inner, **_DSPARK[name]}, "qwen3"
    if family not in ("llama", "qwen3"):
        raise _Unsupported(f"layers of model_type {family!r} are not supported; use llama or qwen3")
    outer = {key: config[key] for key in _OUTER if key in config}
    speculators = _objects(config, "speculators_config")
    if name == "peagle":
        outer["parallel_tokens"] = _speculative_tokens(speculators)
    verifier = _objects(speculators, "verifier")
    return Published(
        _settings({**inner, **outer, "bias": config.get("fusion_bias", False)}),
        kind=kinds[name],
        prefixes=(("fusion_fc.", "fc."), ("transformer.", layer(0))) if name == "eagle" else (),
        qk_norm=family == "qwen3",
        verifier=str(verifier.get("name_or_path") or ""),
        architectures=_names(verifier, "architectures"),
    )


def _speculative_tokens(speculators: Config) -> object:
    """What a head was trained to propose in one pass."""
    for method in speculators.get("proposal_methods") or ():
        if isinstance(method, dict) and method.get("speculative_tokens"):
            return method["speculative_tokens"]
    raise _Unsupported("proposal_methods has no speculative_tokens; download it again")


_DSPARK: Mapping[str, Config] = {
    "dflash": {},
    "dspark": {"sample_from_anchor": True, "markov_rank": 256},
}
"""Defaults of DSpark, which is DFlash with further heads."""

_OUTER = (
    *("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor"),
    *("sliding_window_non_causal", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
"""Settings of speculators that are not the layers' own."""


def _objects(config: Config, name: str) -> dict[str, Any]:
    """A nested object; empty where there is none. null counts as left out."""
    nested = config.get(name, {})
    if not isinstance(nested, dict):
        raise _Unsupported(f"{name} is {nested!r}, expected an object")
    return {key: value for key, value in nested.items() if value is not None}


def _names(config: Config, name: str) -> tuple[str, ...]:
    """A list of names; empty where there is none."""
    value = config.get(name, [])
    if not isinstance(value, list):
        raise _Unsupported(f"{name} is {value!r}, expected a list")
    return tuple(map(str, value))


def _settings(values: Config) -> Settings:
    """The settings that all layouts share. Raises ``_Unsupported``, ``msgspec.ValidationError``."""
    if any(map(values.get, SETTINGS)):
        raise _Unsupported("its weights are quantised; use an unquantised head")
    windowed = values.get("use_sliding_window") and values.get("sliding_window")
    others = set(_names(values, "layer_types")) - {"full_attention"}
    # DFlash's layers say themselves which of them have a window.
    if not values.get("block_size") and (windowed or others):
        raise _Unsupported("only full attention is supported; use a head without sliding windows")
    if values.get("logit_scale", 1) != 1:
        raise _Unsupported("logit_scale is not supported; use a head without it")
    if values.get("norm_before_fc") and values.get("fc_norm"):
        raise _Unsupported("norm_before_fc and fc_norm exclude each other; download it again")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if isinstance(rope, dict):
        inner = ("rope_theta", "partial_rotary_factor")
        values = {**values, **{key: rope[key] for key in inner if rope.get(key) is not None}}
        if (kind := scaling_kind(rope)) not in FIXED_ROPE:
            kinds = ", ".join(sorted(FIXED_ROPE))
            raise _Unsupported(f"RoPE scaling {kind!r} is not supported; expected one of {kinds}")
    return msgspec.convert({k: v for k, v in values.items() if v is not None}, Settings)
