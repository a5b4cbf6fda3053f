"""OpenAI's routes that answer, as the registry of dialects has them."""

from __future__ import annotations

from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.completions import CompletionRequest
from asyncspec_nodes.http.dialects import Dialect

# Also without a version, as llama.cpp has them.
OPENAI = Dialect(
    endpoints={
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
        "/chat/completions": ChatRequest,
        "/completions": CompletionRequest,
    }
)
