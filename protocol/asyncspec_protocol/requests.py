"""A client asks and is answered."""

from __future__ import annotations

from msgspec import Struct


class Submit(Struct, array_like=True, frozen=True, tag="submit"):
    """A client asks the draft node for text."""

    # Chosen by the client, unique on its link.
    request: int
    prompt: str
    max_new_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float = 0.0
    # Node-level default where empty.
    policy: str = ""
    ignore_eos: bool = False
    # As in ``Open``.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Texts that end the answer before the first of them, or with it.
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    # The prompt as tokens, taken as they are; or as a conversation, a JSON list of messages that
    # the target's chat template makes a prompt of. Then ``prompt`` is empty.
    prompt_ids: tuple[int, ...] = ()
    chat: str = ""
    # Every token of the answer comes with its log-probability, and with so many of the likeliest.
    log_probs: bool = False
    top_logprobs: int = 0
    # Refused where the context has no room for ``max_new_tokens`` behind the prompt; else they are
    # cut to what there is.
    must_fit: bool = False
    # Names of the sampling settings above that the user has left out: there the target's own
    # recommendation counts, where it has one.
    unset: tuple[str, ...] = ()
    # Only requests of one tenant share prompt prefixes; those without one share among themselves.
    # An HTTP service derives it from the API key, so that nobody without the key can name it.
    tenant: str = ""


class Output(Struct, array_like=True, frozen=True, tag="output"):
    """New text for a client, as soon as it is certain."""

    request: int
    token_ids: tuple[int, ...]
    text: str
    # Where ``Submit.log_probs`` asks for them, of each of ``token_ids``, in nats, before any
    # sampling setting; and ``Submit.tops`` likeliest tokens with theirs, one token after the other.
    token_log_probs: tuple[float, ...] = ()
    top_tokens: tuple[int, ...] = ()
    top_token_log_probs: tuple[float, ...] = ()
    # The bytes that those tokens mean, of ``token_ids`` and then of ``likely``: a client has no
    # tokenizer.
    token_bytes: tuple[bytes, ...] = ()


BREAKS = "breaks"
"""In ``Finished.code``: the pipeline broke again and again while it read the request."""


class Finished(Struct, array_like=True, frozen=True, tag="finished"):
    """The end of a request: ``stop``, ``length``, ``cancelled`` or ``error``."""

    request: int
    reason: str
    # For "error": the sentence the user reads.
    detail: str
    # Counters, named and defined in docs/reference/metrics.md.
    stats: dict[str, float]
    # For "error": a short name scripts can test, e.g. "busy" or ``BREAKS``.
    code: str = ""


class Cancel(Struct, array_like=True, frozen=True, tag="cancel"):
    """A client no longer wants a request; its slots are freed everywhere."""

    request: int
