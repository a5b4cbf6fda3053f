"""What a request has used, as the API counts it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def usage(ends: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, int]:
    """Of the ends of all answers: the number of the prompt and the answer's counters. A prompt
    with several answers counts once."""
    prompts: dict[int, int] = {}
    completion = 0
    for prompt, stats in ends:
        prompts[prompt] = int(stats.get("prompt_tokens", 0))
        completion += int(stats.get("new_tokens", 0))
    given = sum(prompts.values())
    return {
        "prompt_tokens": given,
        "completion_tokens": completion,
        "total_tokens": given + completion,
    }
