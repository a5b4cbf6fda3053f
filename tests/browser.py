"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import re
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--window-size=1300,1000",
)


KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
"""Virtual key codes of keys that are no characters."""


class Browser:
    """``async with Browser() as page``: one tab. ``problems`` are its errors and what it fetched
    besides the page itself."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()

    async def __aenter__(self) -> Browser:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory()
        flags = [*FLAGS, f"--user-data-dir={self._profile.name}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        self._process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *flags,
            "about:blank",
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TMPDIR": self._profile.name},  # it leaves things there
        )
        port = await self._port()
        self._http = aiohttp.ClientSession()
        async with self._http.get(f"http://127.0.0.1:{port}/json/list") as reply:
            pages = [target for target in await reply.json() if target["type"] == "page"]
        address = pages[0]["webSocketDebuggerUrl"]
        self._socket = await self._http.ws_connect(address, max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._socket.close()
            await self._reader
            await self._http.close()
        finally:
            self._process.kill()
            await self._process.communicate()
            self._profile.cleanup()

    async def open(self, page: Path | str, *, then: str = "") -> None:
        """Load a file or an address and wait until it has drawn itself."""
        self._loaded.clear()
        address = page if isinstance(page, str) else page.as_uri()
        await self.call("Page.navigate", url=f"{address}{then}")
        await self._loaded.wait()
        await self.frame()

    async def frame(self) -> None:
        """Wait for the next picture."""
        await self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def click(self, x: float, y: float) -> None:
        """Press and release the mouse."""
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": x, "y": y, "button": "left", "clickCount": 1}
            await self.call("Input.dispatchMouseEvent", type=kind, **where)
        await self.frame()

    async def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await self.frame()

    async def wheel(self, x: float, y: float, by: float) -> None:
        """Turn the wheel."""
        turn = {"x": x, "y": y, "deltaX": 0, "deltaY": by}
        await self.call("Input.dispatchMouseEvent", type="mouseWheel", **turn)
        await self.frame()

    async def key(self, key: str, code: str = "") -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        number = KEYS.get(key, 0)
        details = {"key": key, "code": code or key, "windowsVirtualKeyCode": number}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **details, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **details)
        await self.frame()

    async def screenshot(self) -> bytes:
        """What is seen, as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        answered = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await answered
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def _port(self) -> str:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            if found := re.search(rb"listening on ws://127\.0\.0\.1:(\d+)", line):
                return found[1].decode()
        raise AssertionError("the browser did not start")

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
                continue
            self._note(event["method"], event["params"])

    def _note(self, method: str, details: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Runtime.exceptionThrown":
                self.problems.append(f"exception: {details['exceptionDetails']}")
            case "Runtime.consoleAPICalled" if details["type"] in ("error", "warning"):
                self.problems.append(f"console: {details['args']}")
            case "Log.entryAdded" if details["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"log: {details['entry']['text']}")
            case "Network.requestWillBeSent" if details["type"] != "Document":
                self.problems.append(f"fetched {details['request']['url']}")
            case _:
                pass
