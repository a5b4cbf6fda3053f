"""Where a session may begin like another one whose layers have recurrent states.

A state is that of one tip and cannot be cut back, so a stage keeps that of one border of chunks of
the prompt, and of the tip. The border is some tokens before the prompt's end: templates render the
next turn of a chat otherwise from there on (an answer without its reasoning, say).
"""

from __future__ import annotations

from asyncspec.core.kv_slots import BLOCK

_RENDERED_OTHERWISE = 16
"""Last tokens of a prompt that the next turn's may not have."""


def kept_state(prompt_length: int, common_prefix: int) -> int:
    """The position of the prompt whose state is kept, so many tokens from the start; 0: of none.
    No state before the ``common_prefix`` that the session has taken over is computed."""
    border = max(0, prompt_length - _RENDERED_OTHERWISE) // BLOCK * BLOCK
    return max(border, common_prefix)
