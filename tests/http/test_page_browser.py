"""The page in a real browser: type, stream, stop, keep, and what a message can do to the page."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace

from asyncspec.core.sampling import Defaults
from browser import CHROMIUM, Browser
from chat_page import BUSY, ask, opened, until, write
from toy_service import ENDLESS, RULES, Toy

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

WORDS = (
    "[...document.querySelectorAll('.message.assistant .text [data-pass]')].map(e => e.textContent)"
)
MESSAGES = "[...document.querySelectorAll('.message')].map((m) => m.className.split(' ')[1])"
STORED = "Object.keys(localStorage).filter((name) => name.startsWith('asyncspec.chat.'))"


@pytest_asyncio.fixture
async def toy() -> AsyncIterator[Toy]:
    # Nothing but the limit ends an answer.
    async with Toy(stages=3, rules=replace(RULES, eos=frozenset())) as toy:
        yield toy


@pytest_asyncio.fixture
async def tab(toy: Toy) -> AsyncIterator[Browser]:
    async with opened(toy.url) as tab:
        yield tab


async def fill(tab: Browser, **values: object) -> None:
    """Set fields of the settings, by their ids."""
    for name, value in values.items():
        field = f"document.getElementById('{name}')"
        change = "dispatchEvent(new Event('input', {bubbles: true}))"
        await tab.run(f"void ({field}.value = {json.dumps(str(value))}, {field}.{change})")


async def test_type_and_read(toy: Toy, tab: Browser) -> None:
    """What is seen is what a client gets, and each word stands in the pass that brought it."""
    assert await tab.run("!document.getElementById('welcome').hidden")
    await fill(tab, most=60, seed=6, system="Be <i>brief</i>.")
    await ask(tab, "<b>hi</b>")
    assert await tab.run("document.getElementById('welcome').hidden")
    assert await tab.run("document.querySelector('.message.user .body').textContent") == "<b>hi</b>"
    assert await tab.run("document.querySelector('.message .body :is(b, i)')") is None
    body = {
        # What the page asks for where a model recommends nothing.
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "max_tokens": 60,
        "seed": 6,
        "messages": [
            {"role": "system", "content": "Be <i>brief</i>."},
            {"role": "user", "content": "<b>hi</b>"},
        ],
    }
    how = f"{{method: 'POST', body: {json.dumps(json.dumps(body))}"
    how += ", headers: {'Content-Type': 'application/json'}}"
    whole = await tab.run(f"fetch('v1/chat/completions', {how}).then((r) => r.json())")
    kept = await tab.run(f"JSON.parse(localStorage.getItem({STORED}[0])).messages")
    assert [message["role"] for message in kept] == ["user", "assistant"]
    content, passes = kept[1]["content"], kept[1]["passes"]
    assert content == whole["choices"][0]["message"]["content"]
    assert sum(one[1] for one in passes) == whole["usage"]["completion_tokens"]
    assert max(one[1] for one in passes) > 1
    assert passes[-1][0] == len(content.encode("utf-16-le")) / 2
    assert "60 tokens in" in await tab.run("document.querySelector('.sum').textContent")
    # The bars are walked by keys, and light the words of their pass.
    await tab.run("document.querySelector('.bars').focus()")
    await tab.key("End")
    said = await tab.run("document.querySelector('.bars').getAttribute('aria-valuetext')")
    assert said.startswith(f"Pass {len(passes)} of {len(passes)}")


@pytest.mark.slow
async def test_a_conversation_goes_on_and_is_kept(toy: Toy, tab: Browser) -> None:
    """It is there after a reload; an answer is made anew, a question edited, and all of it deleted
    and brought back."""
    await fill(tab, most=5)
    await ask(tab, "hi")
    await ask(tab, "and")
    assert await tab.run(MESSAGES) == ["user", "assistant"] * 2
    await tab.run("[...document.querySelectorAll('.tools button')].at(-1).click()")
    await until(tab, f"!{BUSY}")
    assert await tab.run(MESSAGES) == ["user", "assistant"] * 2
    await tab.open(toy.url)
    await until(tab, "document.getElementById('status').textContent === 'ready'")
    assert await tab.run("document.getElementById('most').value") == "5"
    await tab.run("document.querySelector('#conversations .open').click()")
    assert await tab.run(MESSAGES) == ["user", "assistant"] * 2
    await tab.run("document.querySelector('[aria-label=\"Edit and ask again\"]').click()")
    await write(tab, "!")
    await tab.key("Enter")
    await until(tab, f"document.querySelectorAll('.message').length === 2 && !{BUSY}")
    assert await tab.run("document.querySelector('.message.user .body').textContent") == "hi!"
    await tab.run("document.querySelector('#conversations .plain').click()")
    assert await tab.run(f"{STORED}.length") == 0
    assert not await tab.run("document.getElementById('welcome').hidden")
    assert await tab.run("document.activeElement.textContent") == "Undo"
    await tab.run("document.activeElement.click()")
    assert await tab.run(f"{STORED}.length") == 1


@pytest.mark.slow
@pytest.mark.parametrize("by", ["Escape", "button"])
async def test_stop(toy: Toy, tab: Browser, by: str) -> None:
    await fill(tab, most=ENDLESS)
    await write(tab, "hello")
    await tab.key("Enter")
    await until(tab, f"({WORDS}).length > 3")
    assert await tab.run(BUSY)
    if by == "Escape":
        await tab.key("Escape")
    else:
        await tab.run("document.getElementById('stop').click()")
    await toy.settled()
    await until(tab, f"!{BUSY}")
    assert await tab.run("document.querySelector('.note').textContent") == "Stopped."
    assert await tab.run("document.activeElement.id") == "prompt"


async def test_a_question_whose_answer_a_reload_ended_is_not_sent_again(
    toy: Toy, tab: Browser
) -> None:
    await fill(tab, most=ENDLESS)
    await write(tab, "lost")
    await tab.key("Enter")
    await until(tab, f"({WORDS}).length > 3")
    await tab.open(toy.url)
    await until(tab, "document.getElementById('status').textContent === 'ready'")
    await toy.settled()
    await tab.run("document.querySelector('#conversations .open').click()")
    await fill(tab, most=5)
    sent = "window.sent = how?.body ?? window.sent"
    await tab.run(
        f"{{ const f = fetch; window.fetch = (at, how) => {{ {sent}; return f(at, how); }}; }}"
    )
    await ask(tab, "hi")
    body = json.loads(await tab.run("window.sent"))
    assert [(one["role"], one["content"]) for one in body["messages"]] == [("user", "hi")]


@pytest.mark.slow
async def test_what_is_deleted_while_it_is_answered_stays_away(toy: Toy, tab: Browser) -> None:
    await fill(tab, most=ENDLESS)
    await write(tab, "hello")
    await tab.key("Enter")
    await until(tab, f"({WORDS}).length > 3")
    await tab.run("document.querySelector('#conversations .plain').click()")
    await toy.settled()
    await until(tab, f"!{BUSY}")
    assert await tab.run(f"{STORED}.length") == 0
    assert await tab.run(MESSAGES) == []


async def test_the_cluster_is_seen(tab: Browser) -> None:
    cards = "[...document.querySelectorAll('#nodes .name')]"
    cards += ".map((e) => [...e.children].map((c) => c.textContent))"
    await until(tab, f"({cards}).length === 4")
    host = socket.gethostname()
    names = ["Draft node", "Stage 1", "Stage 2", "Stage 3"]
    assert await tab.run(cards) == [[name, host] for name in names]
    await until(tab, "document.getElementById('model').value === 'toy'")
    await fill(tab, most=ENDLESS)
    await write(tab, "hello")
    await tab.key("Enter")
    await until(tab, "[...document.querySelectorAll('#nodes meter')].some((m) => m.value > 0.01)")
    await tab.key("Escape")


async def test_the_panel_beside_the_answer_says_what_speculation_brought(tab: Browser) -> None:
    size = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    await tab.call("Emulation.setDeviceMetricsOverride", **size)
    assert await tab.run("document.getElementById('gain').hidden")
    await fill(tab, most=40)
    await ask(tab, "hello")
    stats = await tab.run(f"JSON.parse(localStorage.getItem({STORED}[0])).messages[1]")
    apiece = sum(one[1] for one in stats["passes"]) / len(stats["passes"])
    assert await tab.run("document.getElementById('apiece').textContent") == f"{apiece:.1f}"
    right = f"{100 * stats['stats']['hit_rate']:.0f} %"
    assert await tab.run("document.getElementById('right').textContent") == right
    side = "document.getElementById('{}').getBoundingClientRect()"
    edges = f"[{side.format('talk')}.right, {side.format('cluster')}.left]"
    assert await tab.run(f"(([answer, panel]) => answer <= panel)({edges})")
    await tab.run("document.getElementById('new').click()")
    assert await tab.run("document.getElementById('gain').hidden")


async def test_the_settings_say_what_the_target_recommends() -> None:
    rules = replace(RULES, defaults=Defaults(temperature=0.65, top_p=0.9))
    async with Toy(rules=rules) as toy, opened(toy.url) as tab:
        assert await tab.run("document.getElementById('temperature').placeholder") == "0.65"
        assert await tab.run("document.getElementById('top-p').placeholder") == "0.9"
        await fill(tab, temperature=7)
        await write(tab, "hi")
        await tab.key("Enter")
        assert await tab.run("document.getElementById('settings').open")
        assert await tab.run("document.activeElement.id") == "temperature"
        assert await tab.run(MESSAGES) == []


async def test_a_key_is_asked_for() -> None:
    async with Toy(keys=("secret",)) as toy, Browser() as tab:
        await tab.open(toy.url)
        await until(tab, "!document.getElementById('keys').hidden")
        await until(tab, "document.activeElement.id === 'key'")
        assert "needs an API key" in await tab.run("document.getElementById('hint').textContent")
        assert await tab.run("document.getElementById('send').disabled")
        await write(tab, "secret")
        await tab.key("Tab")
        await until(tab, "document.getElementById('status').textContent === 'ready'")
        assert (
            await tab.run("Object.values(localStorage).some((v) => v.includes('secret'))") is False
        )
