"""The page in a real browser: type, stream, stop, and look at the picture."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace
from PIL import Image

from asyncspec.core.sampling import Defaults
from browser import CHROMIUM, Browser
from toy_service import ENDLESS, RULES, Toy

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

ANSWER = "[...document.querySelectorAll('.message.assistant .piece')].map((p) => p.textContent)"
TEMPERATURE = "document.getElementById('temperature').value"
BUSY = "!document.getElementById('stop').disabled"


@pytest_asyncio.fixture
async def toy() -> AsyncIterator[Toy]:
    # Nothing but the limit ends an answer.
    async with Toy(stages=3, rules=replace(RULES, eos=frozenset())) as toy:
        yield toy


@pytest_asyncio.fixture
async def tab(toy: Toy) -> AsyncIterator[Browser]:
    async with Browser() as tab:
        await tab.open(toy.url)
        await until(tab, "document.getElementById('ready').textContent === 'ready'")
        yield tab
        # Nothing of another host, no errors, nothing that the content policy had to forbid.
        assert [p for p in tab.problems if not p.startswith(f"fetched {toy.url}/")] == []


async def until(tab: Browser, condition: str) -> None:
    """Wait until something is so in the page; a test's time-out is the bound."""
    while not await tab.run(condition):
        await tab.frame()


async def write(tab: Browser, text: str) -> None:
    for character in text:
        await tab.key(character)


async def set_tokens(tab: Browser, count: int) -> None:
    await tab.run(f"void (document.getElementById('tokens').value = {count})")


async def test_type_and_read(tab: Browser) -> None:
    # The keyboard alone: the message has the focus already.
    await set_tokens(tab, 60)
    await tab.run("void (document.getElementById('seed').value = 5)")
    await write(tab, "<b>hi</b>")
    await tab.key("Enter")
    await until(tab, f"({ANSWER}).length > 1 && !({BUSY})")
    assert await tab.run("document.querySelector('.message.user').textContent") == "<b>hi</b>"
    assert await tab.run("document.querySelector('.message b')") is None
    pieces = await tab.run(ANSWER)
    # What is seen is what a client gets, piece by piece, and tokens per pass beside it.
    body = (
        "JSON.stringify({model: 'toy', temperature: .8, max_tokens: 60, seed: 5,"
        "messages: [{role: 'user', content: '<b>hi</b>'}]})"
    )
    whole = await tab.run(
        "fetch('v1/chat/completions', {method: 'POST', body: "
        f"{body}, headers: {{'Content-Type': 'application/json'}}}}).then((r) => r.json())"
    )
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]
    bars = await tab.run(
        "[...document.querySelectorAll('#passes li')].map((li) => parseInt(li.title))"
    )
    assert sum(bars) == whole["usage"]["completion_tokens"]
    assert max(bars) > 1
    assert "a second" in await tab.run("document.getElementById('rates').textContent")


async def test_the_temperature_is_what_the_target_recommends() -> None:
    """Where it recommends one; and what was typed stays."""
    rules = replace(RULES, defaults=Defaults(temperature=0.65, top_p=0.9))
    async with Toy(rules=rules) as toy, Browser() as tab:
        await tab.open(toy.url)
        await until(tab, f"{TEMPERATURE} === '0.65'")
        await tab.run(f"void ({TEMPERATURE} = '0.33')")
        await set_tokens(tab, 5)
        await write(tab, "hi")
        await tab.key("Enter")
        await until(tab, f"({ANSWER}).length && !({BUSY})")
        assert await tab.run(TEMPERATURE) == "0.33"
        await tab.run(f"void ({TEMPERATURE} = '0.65')")
        await tab.run("document.getElementById('prompt').value = 'hi'")
        await tab.run("document.getElementById('send').click()")
        await until(tab, "document.querySelectorAll('.message.assistant').length === 2")


async def test_a_conversation_goes_on(tab: Browser) -> None:
    await set_tokens(tab, 5)
    for turn in (1, 2):
        await write(tab, "hi")
        await tab.key("Enter")
        done = f"document.querySelectorAll('.message.assistant').length === {turn} && !({BUSY})"
        await until(tab, done)
    roles = await tab.run(
        "[...document.querySelectorAll('.message')].map((m) => m.className.split(' ')[1])"
    )
    assert roles == ["user", "assistant"] * 2


@pytest.mark.parametrize("by", ["Escape", "button"])
async def test_stop(toy: Toy, tab: Browser, by: str) -> None:
    await set_tokens(tab, ENDLESS)
    await write(tab, "hello")
    await tab.key("Enter")
    await until(tab, f"({ANSWER}).length > 3")
    assert await tab.run(BUSY)
    if by == "Escape":
        await tab.key("Escape")
    else:
        await tab.run("document.getElementById('stop').click()")
    await toy.settled()
    await until(tab, f"!({BUSY})")
    assert "stopped" in await tab.run("document.getElementById('messages').textContent")
    assert await tab.run("document.activeElement.id") == "prompt"


async def test_the_cluster_is_seen(tab: Browser) -> None:
    rows = "[...document.querySelectorAll('#nodes tbody tr')].map((r) => r.cells[0].textContent)"
    await until(tab, f"({rows}).length === 4")
    assert await tab.run(rows) == ["draft", "V1", "V2", "V3"]
    assert "toy" in await tab.run("document.getElementById('model').textContent")
    await set_tokens(tab, ENDLESS)
    await write(tab, "hello")
    await tab.key("Enter")
    await until(tab, "[...document.querySelectorAll('#nodes meter')].some((m) => m.value > 0.01)")
    lanes = (
        "(() => { const c = document.getElementById('timeline'), colours = new Set();"
        "const {data} = c.getContext('2d').getImageData(0, 0, c.width, c.height);"
        "for (let i = 0; i < data.length; i += 4) colours.add(data.slice(i, i + 4).join());"
        "return colours.size; })()"
    )
    await until(tab, f"{lanes} > 3")
    picture = Image.open(io.BytesIO(await tab.screenshot()))
    assert picture.size == (1300, 1000) or picture.width > 1000
    assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50
    await tab.key("Escape")


async def test_light_and_dark(tab: Browser) -> None:
    seen = set()
    for scheme in ("light", "dark"):
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        await tab.call("Emulation.setEmulatedMedia", features=preferred)
        await tab.frame()
        style = "getComputedStyle(document.body)"
        text, back = await tab.run(f"[{style}.color, {style}.backgroundColor]")
        assert text != back
        seen |= {text, back}
    assert len(seen) == 4


async def test_a_narrow_window(tab: Browser) -> None:
    size = {"width": 380, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    await tab.call("Emulation.setDeviceMetricsOverride", **size)
    await tab.frame()
    assert await tab.run("document.documentElement.scrollWidth") <= 380


async def test_a_key_is_asked_for() -> None:
    async with Toy(keys=("secret",)) as toy, Browser() as tab:
        await tab.open(toy.url)
        await until(tab, "!document.getElementById('keys').hidden")
        await tab.run("document.getElementById('key').focus()")
        await write(tab, "secret")
        await tab.key("Tab")
        await until(tab, "document.getElementById('ready').textContent === 'ready'")
