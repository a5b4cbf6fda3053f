"""Interfaces of others over the same answers: Anthropic, Ollama, OpenAI's responses. Pure."""
