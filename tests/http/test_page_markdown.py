"""Markdown on the page: how it looks, that it stays text, and that no word is lost."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.app import Service
from asyncspec_nodes.http.server import HttpServer
from asyncspec_protocol.messages import Finished, Output, Status, Submit
from browser import CHROMIUM, Browser
from chat_page import ask, opened

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

HOSTILE = (
    """# All of **Markdown**

<script>document.title = "pwned"</script><img src=x onerror="document.title='pwned'">

[run](javascript:document.title='pwned') [safe](https://example.org/?a=(b)) `<b>`

1. one
   - *two*

```html
<script>document.title = "pwned"</script>
a line that is too long for a phone: """
    + "wide " * 40
    + """
```

| a | b |
|---|--:|
| <i>1</i> | 2 |

> said
"""
)


class Scripted:
    """An engine that answers with one text, in passes of one to three tokens."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def ask(self, submit: Submit) -> AsyncGenerator[Any, None]:
        for number, at in enumerate(range(0, len(self._text), 7)):
            tokens = tuple(range(1 + number % 3))
            yield Output(0, tokens, self._text[at : at + 7])
        yield Finished(0, "stop", "", {"tokens_per_second": 12.0})

    async def nodes(self) -> tuple[Status, ...]:
        return (Status(0, 0, "draft", (0, 0), 1.0, 0.5, 1, 0, 0, 0, last=True, model="x"),)


@asynccontextmanager
async def scripted(text: str) -> AsyncIterator[Browser]:
    service = Service(ServiceOptions(), pending=str)
    service.serve(Scripted(text), "<i>model</i>")
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    async with HttpServer(service, sock) as server, opened(server.url) as tab:
        yield tab


async def test_markdown_is_shown_and_stays_text() -> None:
    """On a phone, in the dark: nothing of an answer runs, nothing but code is wider than the
    page, and a piece of code is copied as it is."""
    async with scripted(HOSTILE) as tab:
        size = {"width": 380, "height": 700, "deviceScaleFactor": 2, "mobile": True}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await ask(tab, "<script>x</script>")
        assert await tab.run("document.title") == "<i>model</i> - asyncspec"
        text = ".message.assistant .body > .text"
        bad = f"document.querySelector('{text} :is(script, img, i, b), .message.user script')"
        assert await tab.run(bad) is None
        found = f"[...document.querySelector('{text}').children].map((e) => e.tagName)"
        assert await tab.run(found) == ["H3", "P", "P", "OL", "DIV", "DIV", "BLOCKQUOTE"]
        links = f"[...document.querySelectorAll('{text} a')].map((a) => a.href)"
        assert await tab.run(links) == ["https://example.org/?a=(b)"]
        assert await tab.run("document.documentElement.scrollWidth") <= 380
        code = await tab.run(f"document.querySelector('{text} pre').textContent")
        assert code == HOSTILE.split("```")[1].removeprefix("html\n").removesuffix("\n")
        # Every character of the answer that is no markup stands in the pass that brought it.
        said = await tab.run(
            f"[...document.querySelectorAll('{text} [data-pass]')]"
            ".map((e) => [Number(e.dataset.pass), e.textContent])"
        )
        for number, part in said:
            assert part.rstrip("\n") in HOSTILE[7 * number : 7 * number + 7]
        await tab.run(
            "void (navigator.clipboard.writeText = async (text) => { window.copied = text; })"
        )
        await tab.run("document.querySelector('.code button').click()")
        assert await tab.run("window.copied") == code
        colours = set()
        for scheme in ("light", "dark"):
            preferred = [{"name": "prefers-color-scheme", "value": scheme}]
            await tab.call("Emulation.setEmulatedMedia", features=preferred)
            await tab.frame()
            style = "getComputedStyle(document.body)"
            colours |= set(await tab.run(f"[{style}.color, {style}.backgroundColor]"))
        assert len(colours) == 4


async def test_a_long_answer_is_shown_while_it_comes() -> None:
    text = "".join(f"Paragraph {i} of *many*.\n\n" for i in range(400))
    async with scripted(text) as tab:
        await ask(tab, "long")
        assert await tab.run("document.querySelectorAll('.text p em').length") == 400
        assert await tab.run("document.querySelectorAll('.bars i').length") <= 120
        bottom = "(({scrollHeight: h, scrollTop: t, clientHeight: c}) => h - t - c)"
        assert await tab.run(f"{bottom}(document.getElementById('scroll'))") < 5


MARKDOWN = """
const {blocks, inline} = await import('/page/markdown.js');
const text = (node, source) => node.kind === 'text'
  ? node.pieces.map(([a, b]) => source.slice(a, b)).join('')
  : `<${node.kind}:${flat(node.inside, source)}>`;
const flat = (nodes, source) => nodes.map((node) => text(node, source)).join('');
return given.map((source) => {
  const begun = performance.now(), found = blocks(source);
  const said = found.map((block) => block.text && block.kind !== 'code'
    ? flat(inline(source, block.text), source) : block.kind);
  return [said, performance.now() - begun];
});
"""


SHOWN = """
const {blocks, inline} = await import('/page/markdown.js');
const walk = (nodes) => nodes.flatMap((node) =>
  node.kind === 'text' ? node.pieces : walk(node.inside));
const all = (block, source) => [
  ...block.kind === 'code' ? block.text : walk(inline(source, block.text ?? [])),
  ...(block.rows ?? []).flat().flatMap((cell) => walk(inline(source, [cell]))),
  ...[block.blocks ?? [], ...block.items ?? []].flat().flatMap((inner) => all(inner, source)),
];
return given.map((source) => blocks(source).flatMap((block) => all(block, source)));
"""


@pytest_asyncio.fixture
async def tab() -> AsyncIterator[Browser]:
    async with scripted("") as tab:
        yield tab


async def test_no_word_is_lost_or_shown_twice(tab: Browser) -> None:
    """Whatever the markup: pieces of the source in order, and every word in one of them."""
    parts = [
        "*",
        "**",
        "_",
        "`",
        "```",
        "~~",
        "[",
        "](",
        "!",
        "\\",
        "\n",
        "\n\n",
        "- ",
        "  - ",
        "1. ",
    ]
    parts += [
        "> ",
        "# ",
        "|",
        "|-|-|",
        "\n|a|b|\n|-|-|\n|c|d|\n",
        "---",
        " ",
        "    ",
        "<b>",
        "w",
        "é",
    ]
    rng = random.Random(1)
    given = ["".join(rng.choices(parts, k=rng.randint(1, 18))) for _ in range(2000)]
    found = await tab.run(f"(async (given) => {{ {SHOWN} }})({json.dumps(given)})")
    for source, pieces in zip(given, found, strict=True):
        ends = [0, *(end for piece in pieces for end in piece)]
        assert ends == sorted(ends), source
        shown = "".join(source[start:end] for start, end in pieces)
        # The word behind the mark of a block of code is its language.
        if "```" not in source:
            assert [c for c in shown if c in "wé"] == [c for c in source if c in "wé"], source


async def test_inline_markup(tab: Browser) -> None:
    cases = {
        "a *b* **c *d***": "a <emphasis:b> <strong:c <emphasis:d>>",
        "`e *f*` ~~g~~": "<code:e *f*> <strike:g>",
        "2 * 3 * 4 snake_case_name": "2 * 3 * 4 snake_case_name",
        "\\*a\\* **open": "*a* **open",
        "see https://a.b/c.": "see <link:https://a.b/c>.",
    }
    endless = ["*" * 20_000, "**a " * 5_000, "[" * 5_000, "> " * 5_000, "- " * 5_000, "`a" * 5_000]
    given = json.dumps([*cases, *endless])
    found = await tab.run(f"(async (given) => {{ {MARKDOWN} }})({given})")
    for (source, wanted), (said, _) in zip(cases.items(), found, strict=False):
        assert said == [wanted], source
    # No text takes more than its length asks for: the slowest takes some 0.1 s.
    assert len(found) == len(cases) + len(endless)


async def test_thoughts_are_folded() -> None:
    async with scripted("<think>\nhm <b>\n</think>\n\nWell, yes.") as tab:
        await ask(tab, "so?")
        thought = "document.querySelector('.thought')"
        assert await tab.run(f"[{thought}.open, {thought}.hidden]") == [False, False]
        assert await tab.run(f"{thought}.querySelector('.text').textContent") == "hm <b>"
        text = ".message.assistant .body > .text"
        assert await tab.run(f"document.querySelector('{text}').textContent") == "Well, yes."
        last = f"[...document.querySelectorAll('{text} [data-pass]')].at(-1).dataset.pass"
        assert await tab.run(last) == "4"
