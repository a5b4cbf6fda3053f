"""``asyncspec run`` wraps prompts through the target's chat template, where it has one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.client.answers import Conversation
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET, PLAIN
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from asyncspec_protocol.messages import Submit
from nodes.background import Background, no_process_left
from nodes.small_target import save_small_target

pytestmark = [pytest.mark.processes, pytest.mark.torch]

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = Submit(0, "", 9, seed=0, temperature=0, top_k=0, top_p=1)
TOKENS = 12


def messages(submit: Submit) -> list[tuple[str, str]]:
    assert submit.prompt == ""
    return [(m["role"], m["content"]) for m in json.loads(submit.chat)]


def test_turns_of_a_chat() -> None:
    talk = Conversation(SETTINGS, chat=True, system="Be brief.")
    first = [("system", "Be brief."), ("user", "a")]
    assert messages(talk.ask("a")) == first
    talk.answered("é\n")
    assert messages(talk.ask("b")) == [*first, ("assistant", "é\n"), ("user", "b")]
    assert messages(Conversation(SETTINGS, chat=True).ask("a")) == [("user", "a")]


def test_turns_of_plain_text() -> None:
    talk = Conversation(SETTINGS, chat=False)
    assert talk.ask("a") == msgspec.structs.replace(SETTINGS, prompt="a")
    talk.answered("b")
    assert talk.ask("c").prompt == "ab\n\nc"


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer target whose tokenizer is the demo models', with a chat template."""
    path = save_small_target(tmp_path_factory.mktemp("instruct"), max_position_embeddings=512)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def served(instruct: Path) -> Iterator[Background]:
    target = TargetTable(path=str(instruct))
    yield from _served(target)


@pytest.fixture(scope="module")
def plain() -> Iterator[Background]:
    """The demo target, as ``asyncspec serve`` has it: chats are joined line by line."""
    yield from _served(TargetTable(path=str(BUNDLED_TARGET), chat_template=PLAIN))


def _served(target: TargetTable) -> Iterator[Background]:
    with no_process_left():
        background = Background(local_config(target, DraftTable(source="ngram"), 2, 1))
        yield background
        background.close()


def generated(path: Path, text: str) -> list[int]:
    """What Hugging Face alone writes after ``text``, whose special tokens it has already."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    found: list[int] = tokens[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def answers(
    background: Background, capsys: pytest.CaptureFixture[str], *argv: str
) -> list[dict[str, Any]]:
    capsys.readouterr()  # what Hugging Face has said
    asked = (*argv, "--json", "--max-new-tokens", str(TOKENS))
    code, out, err = background.ask(capsys, *asked)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.sampled(5)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "<|bos|><user>Once upon\n<assistant>"),
        (("--chat",), "<|bos|><user>Once upon\n<assistant>"),
        (("--system", "Be brief."), "<|bos|><system>Be brief.\n<user>Once upon\n<assistant>"),
        (("--no-chat",), "<|bos|>Once upon"),
        (("--raw",), "<|bos|>Once upon"),
    ],
)
def test_prompts_to_a_target_with_a_template(
    served: Background,
    instruct: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    text: str,
) -> None:
    """By every way to give one."""
    want = generated(instruct, text)
    chat = "<assistant>" in text
    prompt, lines = tmp_path / "prompt.txt", tmp_path / "prompts.jsonl"
    prompt.write_text("Once upon\n")
    lines.write_text(json.dumps({"prompt": "Once upon"}) + "\n")
    for given in (
        ("--prompt", "Once upon"),
        ("--prompt-file", str(prompt)),
        ("--prompts", str(lines)),
    ):
        (answer,) = answers(served, capsys, *given, *options)
        assert (answer["chat"], answer["token_ids"]) == (chat, want)


@pytest.mark.timeout(300)
def test_a_local_run_and_its_reference(
    instruct: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"turns": ["Once upon", "And then"]}) + "\n")
    argv = ["--target", str(instruct), "--prompts", str(lines), "--stages", "2"]
    code = cli.main(["run", *argv, "--check", "--json", "--max-new-tokens", str(TOKENS)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    first, second = map(json.loads, out.splitlines())
    assert first["token_ids"] == generated(instruct, "<|bos|><user>Once upon\n<assistant>")
    talk = f"<|bos|><user>Once upon\n<assistant>{first['text']}\n<user>And then\n<assistant>"
    assert second["token_ids"] == generated(instruct, talk)
    assert first["check"]["equal"]
    assert second["check"]["equal"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_target_that_was_not_made_for_conversations(
    plain: Background, capsys: pytest.CaptureFixture[str]
) -> None:
    (answer,) = answers(plain, capsys, "--prompt", "Once upon")
    assert not answer["chat"]
    assert answer["token_ids"] == generated(BUNDLED_TARGET, "<|bos|>Once upon")
    (answer,) = answers(plain, capsys, "--prompt", "Once upon", "--chat")
    assert answer["chat"]
    assert answer["token_ids"] == generated(BUNDLED_TARGET, "<|bos|>Once upon\n")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("option", [("--chat",), ("--system", "Be brief.")])
def test_a_target_without_a_template(
    option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["run", "--prompt", "Once", *option])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err == (
        "asyncspec: the target's tokenizer has no chat template; ask for a plain completion "
        "(run --no-chat, without --system), or give a template (serve --chat-template FILE)\n"
    )
