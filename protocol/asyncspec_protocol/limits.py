"""Bounds on what a peer can make us allocate, each with its reason, and numbers within them."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

# A header holds ids and small numbers; the longest is a Submit with a prompt of text.
MAX_HEADER_BYTES = 8 * 1024 * 1024
# Before the handshake is done a stranger gets no more than a Hello or a Fault needs.
MAX_HELLO_BYTES = 16 * 1024
# 4,096 rows of 16,384 float32 hidden states.
MAX_TENSOR_BYTES = 256 * 1024 * 1024
# Larger than any vocabulary.
MAX_TOKEN = 2**31 - 1
# A segment is one forward pass; prompts are cut into chunks far below this.
MAX_NODES = 4096
# Tokens of a draft whose length the first stage sets (``Schedule``): a session of such a policy is
# admitted with room for it. DiP-SD's longest, L_ub.
MAX_DRAFT_LENGTH = 20
# Segments of one pass; a receiver waits for all of them.
MAX_COBATCHED = 4096
# EAGLE-3 reads three depths; a deep target has some hundred layers.
MAX_FEATURES = 64
# Upper bound on likeliest tokens per node: more than any client or policy requests.
MAX_TOP_LOGPROBS = 256
# Upper bound on anything counted or numbered. Every reader of JSON takes it, a float holds it
# exactly, and sums of a thousand still fit in the 64 bits that an integer has on the wire.
MAX_COUNT = 2**53 - 1
# Longer than any context.
MAX_CAPACITY = 2**31
# Nodes of a session's tree: a prune names all of them, and those accepted of late.
MAX_TREE_NODES = 2 * MAX_NODES
# Candidates that a token source looks at for one tree, which other sessions wait for: a thirtieth
# of a second, and some hundred bytes each. It expands ``MAX_TREE_NODES`` of them at most.
MAX_CANDIDATES = 2**16
# A beginning of a text is named by a hash (``PrefixKeys``), one for every so many tokens: what is
# stored of it ends there. Fewer would make names long, more would leave more to be read again.
PREFIX_UNIT = 16
PREFIX_KEY_BYTES = 16
# Names of one text: of a million tokens.
MAX_PREFIX_KEYS = 2**16
# Seconds of anything, a clock or a duration: some ten thousand years. Sums and products of a few
# of them are still numbers.
MAX_SECONDS = 1e12
# A pass that takes less, but something, would make ratios to it infinite.
MIN_SECONDS = 1e-12
# Log-probabilities and scores, in nats: next to it a token is as good as impossible.
MIN_LOG_PROB = -1e6
# A tensor of hidden states has two dimensions; a few more cost nothing.
MAX_DIMENSIONS = 4

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    # Rows of bfloat16 values in fewer bytes (asyncspec.backend.row_compression).
    "bfloat16-packed-2": 1,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "uint64": 8,
}
"""The dtypes that may travel, and the bytes of one item."""

_MAX_FLOAT = sys.float_info.max

# Types of fields. A float with a bound is a number, neither NaN nor infinite.
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Token = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
# -1: not known, or no bound.
OptionalSeconds = Annotated[float, Meta(ge=-1, le=MAX_SECONDS)]
Finite = Annotated[float, Meta(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]
NonNegative = Annotated[float, Meta(ge=0, le=_MAX_FLOAT)]
LogProb = Annotated[float, Meta(ge=-_MAX_FLOAT, le=0)]
