"""The programs, how they are installed, and what shows a capability of theirs.

A client's version is that of its first package. In a command {python}, {bin} and {programs} stand
for its environment's interpreter and folder of commands and for the programs here, {node} and
{folder} for node and the environment, {target} for the target's folder; {url}, {task} and
{question} for what it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from tools.clients.dictation import ANSWER, DONE, FILE, FORM
from tools.clients.service import MODEL

PROGRAMS = Path(__file__).parent / "programs"

Capability = Literal["chat", "stream", "tools", "edit", "scores"]
CAPABILITIES: Mapping[Capability, str] = {
    "chat": "chat",
    "stream": "stream",
    "tools": "tools",
    "edit": "edits a file",
    "scores": "scores texts",
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
        return self.name.lower().replace(" ", "-").replace("(", "").replace(")", "")


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

# LiteLLM and what uses it: no prices from the network.
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_AIDER = (
    f"{{bin}}/aider --model openai/{MODEL} --edit-format diff --no-git --yes-always"
    " --no-check-update --no-show-model-warnings --no-analytics --message"
).split()


def _library(name: str, interface: str, packages: Sequence[str], program: str) -> Client:
    """A library, by a program here; what it writes are its answers."""
    javascript = program.endswith(".mjs")
    first = ("{node}",) if javascript else ("{python}",)
    last = ("{folder}",) if javascript else ()

    def command(mode: str, text: str) -> tuple[str, ...]:
        return (*first, f"{{programs}}/{program}", mode, "{url}", text, *last)

    checks = (
        Check(("chat",), command("chat", "{question}")),
        Check(("stream",), command("stream", "{question}")),
        Check(EDIT, command("edit", "{task}"), DONE),
    )
    return Client(name, interface, tuple(packages), checks, _OFFLINE, javascript)


_GUIDELLM = ("{python}", "{programs}/guidellm_run.py", "stream", "{url}", "{question}")
_LM_EVAL = ("{python}", "{programs}/lm_eval_tasks.py")
_FORMS = ("{python}", "{programs}/instructor_forms.py")

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
    _agent(
        "Qwen Code",
        "OpenAI",
        "@qwen-code/qwen-code",
        ("{bin}/qwen", "--yolo", "--auth-type", "openai", "--prompt"),
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "unused", "OPENAI_MODEL": MODEL},
    ),
    Client(
        "aider",
        "OpenAI",
        ("aider-chat",),
        (
            Check(CHAT, (*_AIDER, "{question}")),
            Check(("edit",), (*_AIDER, "{task}", FILE), f"Applied edit to {FILE}"),
        ),
        {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "unused", **_OFFLINE},
    ),
    _library("openai (Python)", "OpenAI, Responses", ["openai"], "openai_sdk.py"),
    _library("openai (JavaScript)", "OpenAI, Responses", ["openai"], "openai_sdk.mjs"),
    _library("anthropic (Python)", "Anthropic", ["anthropic"], "anthropic_sdk.py"),
    _library("anthropic (JavaScript)", "Anthropic", ["@anthropic-ai/sdk"], "anthropic_sdk.mjs"),
    _library("ollama (Python)", "Ollama", ["ollama"], "ollama_sdk.py"),
    _library("ollama (JavaScript)", "Ollama", ["ollama"], "ollama_sdk.mjs"),
    _library("LiteLLM", "OpenAI, Anthropic, Ollama", ["litellm"], "litellm_sdk.py"),
    _library("LiteLLM proxy", "OpenAI", ["litellm[proxy]"], "litellm_proxy.py"),
    _library("LangGraph", "OpenAI", ["langgraph", "langchain-openai"], "langgraph_agent.py"),
    _library("pydantic-ai", "OpenAI", ["pydantic-ai-slim[openai]"], "pydantic_agent.py"),
    _library("openai-agents", "OpenAI, Responses", ["openai-agents"], "openai_agents.py"),
    _library("smolagents", "OpenAI", ["smolagents[openai]"], "smolagents_agent.py"),
    _library("langchain-ollama", "Ollama", ["langchain-ollama", "langchain"], "ollama_agent.py"),
    _library(
        "LlamaIndex",
        "OpenAI",
        ["llama-index-llms-openai-like", "llama-index-core"],
        "llama_index_agent.py",
    ),
    _library("Haystack", "OpenAI", ["haystack-ai"], "haystack_agent.py"),
    _library("AI SDK", "OpenAI", ["ai", "@ai-sdk/openai-compatible"], "ai_sdk.mjs"),
    _library("llm", "OpenAI", ["llm"], "llm_cli.py"),
    Client(
        "instructor",
        "OpenAI",
        ("instructor",),
        (
            Check(("chat", "tools"), (*_FORMS, "chat", "{url}", "{question}"), FORM["city"]),
            Check(("stream",), (*_FORMS, "stream", "{url}", "{question}"), FORM["city"]),
        ),
    ),
    Client(
        "lm-eval",
        "OpenAI",
        # It counts the tokens of what it scores by itself. torch is there, but not what it needs.
        ("lm-eval[api]", "transformers", "torch"),
        (
            Check(("chat",), (*_LM_EVAL, "chat", "{url}", "{question}")),
            Check(("scores",), (*_LM_EVAL, "scores", "{url}", "{question}"), '"acc,none": 0.5'),
        ),
        {"TOKENIZER": "{target}"},
    ),
    Client(
        "guidellm", "OpenAI", ("guidellm",), (Check(CHAT, _GUIDELLM),), {"TOKENIZER": "{target}"}
    ),
)
