"""Another package, installed: every object that it brings is used on the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from http_process import post, process

EXAMPLE = Path(__file__).parent / "plugin_example"
TARGET = "example:layers=4,vocab=64"

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of processes that have the example installed."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--target", str(site), str(EXAMPLE)),
        ],
        check=True,
    )
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def asyncspec(environment: dict[str, str], *arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "asyncspec_nodes.cli.main", *arguments]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_is_listed_with_its_package(environment: dict[str, str]) -> None:
    listed = asyncspec(environment, "plugins")
    for name in ("example-pairs", "example-repeat", "example", "example-greet"):
        line = next(line for line in listed.splitlines() if line.split()[:1] == [name])
        assert "asyncspec-example-plugin 1.0" in line


def test_its_command(environment: dict[str, str]) -> None:
    assert asyncspec(environment, "example-greet", "Ada") == "Hello, Ada\n"
    assert "greet somebody" in asyncspec(environment, "--help")


def test_its_policy_on_a_virtual_clock(environment: dict[str, str]) -> None:
    assert "example-pairs" in asyncspec(environment, "policies")
    table = asyncspec(environment, "simulate", "--policy", "example-pairs", "--tokens", "16")
    assert "example-pairs" in table


def test_its_backend_and_its_policy_on_real_processes(environment: dict[str, str]) -> None:
    text = asyncspec(
        environment,
        *("run", "--target", TARGET, "--draft", "twin", "--stages", "2", "--check"),
        *("--policy", "example-pairs", "--max-new-tokens", "16", "--prompt", "abc"),
    )
    assert text.strip()


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["example-repeat:7", "twin+example-repeat:7"])
def test_its_token_source(environment: dict[str, str], draft: str) -> None:
    text = asyncspec(
        environment,
        *("run", "--target", "toy:layers=4,vocab=64", "--draft", draft, "--stages", "2"),
        *("--check", "--max-new-tokens", "16", "--prompt", "abc"),
    )
    assert text.strip()


@pytest.mark.asyncio
async def test_its_dialect(environment: dict[str, str]) -> None:
    options = ("--target", "toy:layers=4", "--draft", "twin", "--stages", "2", "--port", "0")
    serving = process("asyncspec_nodes.cli.main", "serve", *options, env=environment)
    async with serving as (child, url), aiohttp.ClientSession(url) as web:
        await loaded(web)
        async with web.get("/example/model") as reply:
            assert (await reply.json()).keys() == {"example"}
        answer = await post(web, "/example/complete", prompt="abc", max_tokens=4)
        assert answer["usage"]["completion_tokens"] == 4
        child.terminate()


async def loaded(web: aiohttp.ClientSession) -> None:
    """Return once the service answers."""
    while True:
        async with web.get("/ready") as reply:
            if reply.status == 200:
                return


def test_all_that_it_brings_conforms(environment: dict[str, str]) -> None:
    """Its own tests, which import ``asyncspec.testing``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    result = subprocess.run(
        [
            *(*command, "-c", os.devnull, "--import-mode=importlib", "--hypothesis-seed=0"),
            str(EXAMPLE / "conformance.py"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "4 passed" in result.stdout, result.stdout + result.stderr


def test_its_mistakes_are_the_users(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "asyncspec_nodes.cli.main", "run"]
    result = subprocess.run(
        [*command, "--target", "toy:layers=4", "--draft", "example-repeat:x", "--prompt", "a"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 2
    assert result.stderr == "asyncspec: example-repeat needs a token id, as in example-repeat:7\n"
