"""Twelve requests of a served model at once, and again while a stage is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import psutil

from http_process import post, process

PROMPT = "Once upon a time there was a little fox"


async def check_twelve(target: Path) -> None:
    """Raises ``AssertionError`` where a text is not what its request gets alone."""
    argv = ("serve", "--port", "0", "--stages", "2", "--target", str(target), "--draft", "ngram")
    async with (
        process("asyncspec_nodes.cli.main", *argv) as (child, url),
        aiohttp.ClientSession(url) as web,
    ):

        async def text(prompt: str) -> str:
            ask = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer: str = (await post(web, "/v1/completions", **ask))["choices"][0]["text"]
            return answer

        prompts = [f"{PROMPT} {number} " * (1 + number % 3) for number in range(12)]
        alone = [await text(prompt) for prompt in prompts]
        assert await asyncio.gather(*map(text, prompts)) == alone
        asked = [asyncio.create_task(text(prompt)) for prompt in prompts]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        family = psutil.Process(child.pid).children(recursive=True)
        next(one for one in family if "verify" in " ".join(one.cmdline())).kill()
        assert await asyncio.gather(*asked) == alone
        child.terminate()
