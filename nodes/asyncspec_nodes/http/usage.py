"""What a request has used, as the API counts it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Usage = dict[str, int | dict[str, int]]


def usage(ends: Iterable[tuple[int, Mapping[str, float]]]) -> Usage:
    """Of the ends of all answers: the number of the prompt and the answer's counters. A prompt
    with several answers counts once."""
    prompts: dict[int, int] = {}
    cached: dict[int, int] = {}
    completion = 0
    for prompt, stats in ends:
        prompts[prompt] = int(stats.get("prompt_tokens", 0))
        # Of several answers the first has read the prompt, unless it was known before.
        taken = int(stats.get("shared_tokens", 0))
        cached[prompt] = min(cached.get(prompt, taken), taken)
        completion += int(stats.get("new_tokens", 0))
    given = sum(prompts.values())
    return {
        "prompt_tokens": given,
        "completion_tokens": completion,
        "total_tokens": given + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }
