"""Tokenizers with several chat templates: which of them a conversation is written by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from asyncspec.backend.chat_templates import by_name, chosen, used
from asyncspec.plugins.hf.checkpoint.tokenizer import load_tokenizer
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET

TEXTS = {
    "default": "{% for m in messages %}{{ m.content }}{% endfor %}>",
    "tool_use": "TOOLS {% for m in messages %}{{ m.content }}{% endfor %}>",
    "rag": "RAG {% for m in messages %}{{ m.content }}{% endfor %}>",
}
TOOL = {"type": "function", "function": {"name": "f"}}


def _chat(tools: list[object], **options: object) -> str:
    whole = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "options": options}
    return json.dumps(whole)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["list", "dict", "files"])
def test_default_is_used_and_tool_use_with_tools_and_others_by_name(
    form: str, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_TARGET / name, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_bytes())
    config.pop("chat_template", None)
    if form == "files":
        (tmp_path / "chat_template.jinja").write_text(TEXTS["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(TEXTS[name])
    else:
        listed = [{"name": name, "template": text} for name, text in TEXTS.items()]
        config["chat_template"] = listed if form == "list" else TEXTS
    file.write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.has_template
    assert tokenizer.template == TEXTS["default"] + TEXTS["tool_use"]
    assert tokenizer.prompt(_chat([])) == "hi>"
    assert tokenizer.prompt(_chat([TOOL])) == "TOOLS hi>"
    assert tokenizer.prompt(_chat([TOOL], chat_template="default")) == "hi>"
    assert tokenizer.prompt(_chat([], chat_template="rag")) == "RAG hi>"
    with pytest.raises(ValueError, match="no chat template 'x'; there are: default, rag, tool_use"):
        tokenizer.prompt(_chat([], chat_template="x"))


def test_one_template_is_the_default_and_without_a_default_there_is_a_first() -> None:
    assert chosen(by_name("a"), None, tools=True) == "a"
    assert chosen({"rag": "r"}, None, tools=False) == "r"
    assert chosen({"tool_use": "t", "rag": "r"}, None, tools=False) == "t"
    assert used({"rag": "r"}) == "r"
    assert by_name(None) == {}
    assert used({}) == ""
