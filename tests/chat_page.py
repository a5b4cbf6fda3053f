"""The chat page in a headless Chromium."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from browser import Browser

BUSY = "document.getElementById('send').hidden"


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Browser]:
    """The page, once it is ready; at the end there must have been no errors, nothing of another
    host, and nothing that the content policy had to forbid."""
    async with Browser() as tab:
        await tab.open(url)
        await until(tab, "document.getElementById('status').textContent === 'ready'")
        yield tab
        assert [p for p in tab.problems if not p.startswith(f"fetched {url}/")] == []


async def until(tab: Browser, condition: str) -> None:
    """Wait until something is so in the page; a test's time-out is the bound."""
    while not await tab.run(condition):
        await tab.frame()


async def write(tab: Browser, text: str) -> None:
    for character in text:
        await tab.key(character)


async def ask(tab: Browser, text: str) -> None:
    """Ask by keyboard alone: the message has the focus already."""
    before = await tab.run("document.querySelectorAll('.message').length")
    await write(tab, text)
    await tab.key("Enter")
    await until(tab, f"document.querySelectorAll('.message').length === {before + 2} && !{BUSY}")
