"""A session begins and ends on every node that serves it."""

from __future__ import annotations

from msgspec import Struct

from .ids import Rank, SessionId

FINAL = -1
"""In ``Open.features``: the last hidden state after the final norm, which the head reads."""


class Open(Struct, array_like=True, frozen=True, tag="open"):
    """Starts a session. Travels down the pipeline, so it arrives before the first segment."""

    session: SessionId
    # Nodes 0..prompt_length-1 are committed from the start.
    prompt_length: int
    # Largest number of tokens (prompt and answer) this session can reach: admission by memory.
    capacity: int
    # The token drawn at a position is a function of these and the logits alone.
    seed: int
    # 0 is greedy.
    temperature: float
    # 0: no limit.
    top_k: int
    # 1: no limit.
    top_p: float
    # 0: no limit.
    min_p: float = 0.0
    # Penalties on tokens of a row's own path; with any of them, segments bear tokens everywhere.
    # 1: none. On those of prompt and answer.
    repetition_penalty: float = 1.0
    # 0: none. On those of the answer: once, and for each time.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Tokens at the end of the prompt that are answer, of an earlier session of the same request.
    resumed_tokens: int = 0
    # What the token source reads of the target, for every node: the residual stream after so many
    # layers, ascending, or ``FINAL`` alone. Empty: nothing, and nothing travels.
    features: tuple[int, ...] = ()
    # Of every verdict so many of the target's likeliest tokens come with their probabilities, for
    # policies that do not always take the one that was drawn. 0: none do.
    top_logprobs: int = 0
    # The log-probability of every drawn token comes with it, for users who ask for it.
    log_probs: bool = False
    # Its first ``shared`` prompt nodes are those of the session ``like``, whose prompt every stage
    # has computed and still holds: they are taken over from there and never sent. -1: of none.
    parent_session: SessionId = SessionId(-1)
    common_prefix: int = 0
    # Segments of it that wait at a stage may share a pass, where that costs less than one for each.
    coalesce: bool = False
    # Nodes of its tree at most: its cache may come to ``capacity`` and these. -1: not said.
    max_tree_nodes: int = -1


class Close(Struct, array_like=True, frozen=True, tag="close"):
    """Ends a session at every stage at once; may overtake its ``Open``."""

    session: SessionId
    # The prompt stays in the cache, for sessions that begin like it, until a second ``Close``.
    keep: bool = False


class Closed(Struct, array_like=True, frozen=True, tag="closed"):
    """A stage's account of a session it has freed."""

    session: SessionId
    rank: Rank
    # Forward passes, rows in them, and rows whose node was dead before the pass had ended.
    passes: int
    rows: int
    dead_rows: int
    # Time the device spent on this session's passes, in seconds.
    compute_seconds: float
    # Bytes this stage wrote for the session, headers included.
    bytes_sent: int
    # Its prompt stays in the cache; the ``Close`` that ends that is answered as well.
    kept: bool = False
