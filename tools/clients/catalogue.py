"""The programs, how they are installed, and what shows a capability of theirs.

A client's version is that of its first package. In a command {python}, {bin} and {programs} stand
for its environment's interpreter and folder of commands and for the programs here; {url}, {task}
and {question} for what it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from tools.clients.dictation import ANSWER, DONE
from tools.clients.service import MODEL

PROGRAMS = Path(__file__).parent / "programs"

Capability = Literal["chat", "stream", "tools", "edit"]
CAPABILITIES: Mapping[Capability, str] = {
    "chat": "chat",
    "stream": "stream",
    "tools": "tools",
    "edit": "edits a file",
}


class Check(Struct, frozen=True):
    """A command that shows capabilities: it ends well and writes ``says``; where one is an edit, it
    has also edited the file."""

    capabilities: tuple[Capability, ...]
    command: tuple[str, ...]
    says: str = ANSWER


class Client(Struct, frozen=True):
    """A program, or a library and the programs here that use it."""

    name: str
    interface: str
    packages: tuple[str, ...]
    checks: tuple[Check, ...]
    environ: Mapping[str, str] = {}
    javascript: bool = False

    @property
    def slug(self) -> str:
        """Its name in commands and paths."""
        return self.name.lower().replace(" ", "-")


CHAT: tuple[Capability, ...] = ("chat", "stream")
EDIT: tuple[Capability, ...] = ("tools", "edit")


def _agent(
    name: str, interface: str, package: str, words: Sequence[str], environ: Mapping[str, str]
) -> Client:
    """An agent from npm that edits by calls and always streams."""
    checks = (
        Check(CHAT, (*words, "{question}")),
        Check(EDIT, (*words, "{task}"), DONE),
    )
    return Client(name, interface, (package,), checks, environ, javascript=True)


_CODEX = (
    "{bin}/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
    f" --model {MODEL} --config model_provider=local --config"
).split()
_CODEX_PROVIDER = 'model_providers.local={name="local",base_url="{url}/v1",wire_api="responses"}'
_CLAUDE = ("{bin}/claude", "--model", MODEL, "--permission-mode", "acceptEdits", "--print")
_CLAUDE_ENVIRON = {
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_AUTH_TOKEN": "unused",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
_OPENCODE = {
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "unused"},
            "models": {MODEL: {}},
        }
    },
    "permission": {"edit": "allow"},
    "small_model": f"local/{MODEL}",
}

CLIENTS: Sequence[Client] = (
    _agent("Codex CLI", "Responses", "@openai/codex", (*_CODEX, _CODEX_PROVIDER), {}),
    _agent("Claude Code", "Anthropic", "@anthropic-ai/claude-code", _CLAUDE, _CLAUDE_ENVIRON),
    _agent(
        "opencode",
        "OpenAI",
        "opencode-ai",
        ("{bin}/opencode", "run", "--model", f"local/{MODEL}"),
        {"OPENCODE_CONFIG_CONTENT": json.dumps(_OPENCODE)},
    ),
)
