"""How long an answer took, in the names of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Mapping


def timings(stats: Mapping[str, float]) -> dict[str, float]:
    """llama-server's ``timings`` from the statistics of a request. ``prompt_n`` leaves out the
    tokens of the prefix cache, ``cache_n``; milliseconds are of wall time."""
    prompt = int(stats.get("prompt_tokens", 0)) - (cached := int(stats.get("shared_tokens", 0)))
    predicted = int(stats.get("new_tokens", 0))
    prompt_ms, predicted_ms = (
        1e3 * stats.get(f"{part}_seconds", 0.0) for part in ("prompt", "decode")
    )
    return {
        "cache_n": cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt if prompt else 0.0,
        "prompt_per_second": stats.get("prompt_per_second", 0.0),
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        # Decoding begins behind the first token, which the prompt's last pass brings.
        "predicted_per_token_ms": predicted_ms / (predicted - 1) if predicted > 1 else 0.0,
        "predicted_per_second": stats.get("tokens_per_second", 0.0),
        "draft_n": int(stats.get("drafted_nodes", 0)),
        "draft_n_accepted": int(stats.get("hits", 0)),
    }
