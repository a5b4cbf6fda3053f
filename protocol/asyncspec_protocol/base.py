"""The base of all messages: one flat array with its checks, and the type of a tensor behind it."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, Struct

from .errors import RemoteProtocolError
from .limits import (
    ITEM_BYTES,
    MAX_COUNT,
    MAX_DIMENSIONS,
    MAX_FEATURES,
    MAX_TENSOR_BYTES,
    MAX_TOP_LOGPROBS,
    LogProb,
    Token,
)

FINAL = -1
"""As a depth: the last hidden state after the final norm, which the head reads."""

Depths = Annotated[tuple[int, ...], Meta(max_length=MAX_FEATURES)]
"""What a token source, or a client, reads of the target: the residual stream after so many layers,
ascending; ``FINAL`` stands behind them, or alone."""


def require(fact: bool, rule: str) -> None:
    """Raise ``RemoteProtocolError`` with the text ``rule`` unless ``fact`` holds."""
    if not fact:
        raise RemoteProtocolError(rule)


def check_depths(depths: Depths) -> None:
    """Raise ``RemoteProtocolError`` unless ``depths`` ascend without repetition, but for ``FINAL``
    at the end."""
    layers = depths[:-1] if depths[-1:] == (FINAL,) else depths
    ascend = list(layers) == sorted(set(layers)) and min(layers, default=0) >= 0
    require(ascend, "features are ascending depths, and -1 behind them or alone")


class TensorSpec(Struct, array_like=True, frozen=True):
    """Dtype and shape of the raw bytes behind a header: C order, little endian."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of the raw bytes; a ``KeyError`` where the dtype is unknown."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def check(self) -> None:
        """Raise ``RemoteProtocolError`` for an unknown dtype, a bad shape or too large a tensor."""
        require(self.dtype in ITEM_BYTES, f"unknown dtype {self.dtype!r}")
        require(0 < len(self.shape) <= MAX_DIMENSIONS, "a tensor has 1 to 4 dimensions")
        require(min(self.shape) > 0, "a tensor is not empty")
        require(self.nbytes <= MAX_TENSOR_BYTES, "the tensor is too large")


class PromptLogprobs(Struct, array_like=True, frozen=True, gc=False):
    """Log-probabilities of successive prompt tokens given those before them, in nats, before any
    sampling setting."""

    log_probs: tuple[LogProb, ...]
    # Their places among all tokens by probability; 1 is the likeliest.
    ranks: tuple[Annotated[int, Meta(ge=1, le=MAX_COUNT)], ...]
    # In the place of each as many of the likeliest tokens, best first, one place after the other.
    top_tokens: tuple[Token, ...] = ()
    top_log_probs: tuple[LogProb, ...] = ()

    def check(self) -> None:
        """Raise ``RemoteProtocolError`` where lists differ in length."""
        count, top = len(self.log_probs), len(self.top_tokens)
        require(count == len(self.ranks), "every prompt token has a rank")
        require(top == len(self.top_log_probs), "every likeliest token has a log-probability")
        require(top <= count * MAX_TOP_LOGPROBS, "a prompt token has at most 256 likeliest tokens")
        require(not top or top % count == 0, "every prompt token has as many likeliest tokens")


class WireMessage(Struct, array_like=True, frozen=True):
    """A message. Field types bound its numbers and lengths (``limits``); the rest is in ``check``,
    which runs on every message that is received."""

    def check(self) -> None:
        """Raises ``RemoteProtocolError`` for what field types cannot express."""

    def check_tensor(self, tensor: TensorSpec | None) -> None:
        """Raises ``RemoteProtocolError`` for a tensor that does not belong to the message."""
        require(tensor is None, f"{type(self).__name__} does not carry a tensor")
