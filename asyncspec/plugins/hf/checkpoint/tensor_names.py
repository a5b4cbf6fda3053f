"""Names of tensors that some families have in place of the usual ones."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES: Mapping[str, Mapping[str, str]] = {
    "FalconH1": {"model.final_layernorm.": "model.norm."},
    "Bamba": {"model.final_layernorm.": "model.norm."},
    "Lfm2": {"model.embedding_norm.": "model.norm."},
    "Lfm2Moe": {"model.embedding_norm.": "model.norm."},
    "NemotronH": {
        "backbone.embeddings.": "model.embed_tokens.",
        "backbone.norm_f.": "model.norm.",
        "backbone.": "model.",
        "model.embeddings.": "model.embed_tokens.",
        "model.norm_f.": "model.norm.",
    },
}
"""By family what names begin with, and the usual beginning; as transformers has it last."""

_INNER: Mapping[str, Mapping[str, str]] = {
    "KimiLinear": {".block_sparse_moe.": ".mlp."}
    | {
        f".self_attn.{part}": f".self_attn.forget_gate.{part}"
        for part in ("f_a_proj.", "f_b_proj.", "dt_bias", "A_log")
    },
}
"""By family parts of names in files, and in transformers' model."""

NORMS = ("norm", "norm_f", "embedding_norm", "final_layernorm")
"""Names of a model's last norm."""

EMBEDDINGS = ("embed_tokens", "embeddings")
"""Names of a model's embedding."""


def usual_prefixes(architecture: str) -> Mapping[str, str]:
    """What names of a family's tensors begin with, and the usual beginning."""
    return _NAMES.get(architecture.removesuffix("ForCausalLM"), {})


def inner_name(architecture: str, name: str) -> str:
    """A tensor's name with the parts that transformers' model has."""
    for part, model_part in _INNER.get(architecture.removesuffix("ForCausalLM"), {}).items():
        name = name.replace(part, model_part)
    return name


def family_name(architecture: str, name: str) -> str:
    """A tensor's name in transformers' model, from the usual one."""
    for prefix, usual in [*usual_prefixes(architecture).items()][::-1]:
        if name.startswith(usual) and usual != "model.":
            return prefix + name.removeprefix(usual)
    return name


def norm_name(body: object) -> str:
    """The name of a transformers model's last norm."""
    return next(name for name in NORMS if hasattr(body, name))


def embedding_name(body: object) -> str:
    """The name of a transformers model's embedding."""
    return next(name for name in EMBEDDINGS if hasattr(body, name))
