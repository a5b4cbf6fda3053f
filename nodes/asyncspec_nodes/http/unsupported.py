"""Parameters of the API that are not served: what may stand there all the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from asyncspec_nodes.http.errors import invalid

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
    }
)
"""They change nothing of an answer."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""They ask for something this service does not do, but for these values, and null."""


def without_unsupported(fields: Mapping[str, object]) -> dict[str, object]:
    """The parameters that are left to be read. Raises ``ApiError`` for one that asks for what is
    not served."""
    left = {}
    for name, value in fields.items():
        if name in IGNORED:
            continue
        if name in NEUTRAL:
            if value is not None and not any(_same(value, fine) for fine in NEUTRAL[name]):
                raise invalid(
                    f"{name} is not supported by this service; leave it out",
                    name,
                    "unsupported_parameter",
                )
            continue
        left[name] = value
    return left


def _same(value: object, other: object) -> bool:
    """Equal; true is not 1, but 1.0 is."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
