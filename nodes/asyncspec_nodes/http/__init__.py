"""The OpenAI-compatible HTTP service, on top of a draft node (docs/reference/http.md)."""
