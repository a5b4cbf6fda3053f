"""Templates that take too much end in a process of their own, and the next conversation is
written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from asyncspec.backend.template_worker import LIMITS, MAX_BYTES, TemplateWorker
from asyncspec.constraint.worker import BoundError

MAKERS = (
    "asyncspec.plugins.hf.checkpoint.templates:make",
    "asyncspec.plugins.llama.templates:make",
)

BOMBS = {
    "power": ("{{ (10**(10**7)) % 7 }}", f"{LIMITS.seconds:g} s of processor time"),
    # One line of them alone is past the bound, before a page of it is written: pages take
    # processor time too, on some machines the two seconds.
    "lines": ("{{ ('a\\n' * 100) | indent(1000000000) }}", f"{LIMITS.mebibytes} MiB of memory"),
    "width": ("{{ '%9999999999d' % 3 }}", f"{LIMITS.mebibytes} MiB of memory"),
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        f"{LIMITS.seconds:g} s of processor time",
    ),
    "calls": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it is nested too deeply"),
    "parentheses": ("{{" + "(" * 9000 + "1" + ")" * 9000 + "}}", "it is nested too deeply"),
    "length": ("{{ 'x' * 20000000 }}", f"it writes 20000000 bytes; at most {MAX_BYTES} are read"),
}


def _chat(template: str) -> str:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"messages": messages, "tools": [], "options": {"chat_template": template}})


@pytest.fixture(scope="module", params=MAKERS, ids=("hf", "llama"))
def write(request: pytest.FixtureRequest) -> Iterator[TemplateWorker]:
    texts = {"default": "{{ messages[0].content }}{{ eos_token }}"}
    worker = TemplateWorker(
        request.param, texts | {n: t for n, (t, _) in BOMBS.items()}, {"eos_token": "<e>"}
    )
    yield worker
    worker.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_takes_too_much_is_ended_in_one_line(
    bomb: str, write: Callable[[str], str]
) -> None:
    with pytest.raises(BoundError) as caught:
        write(_chat(bomb))
    why = str(caught.value)
    assert why.startswith("the chat template cannot be used: ")
    assert BOMBS[bomb][1] in why
    assert "\n" not in why
    assert write(_chat("default")) == "hi<e>"


def test_text_that_is_no_text_is_refused(write: Callable[[str], str]) -> None:
    for chat in ('[{"role": "user", "content": "\\ud800"}]', '[{"content": "\ud800"}]'):
        with pytest.raises(ValueError, match=r"refuses these messages|conversation is none"):
            write(chat)
    assert write('[{"content": "\U0001f600"}]') == "\U0001f600<e>"
