"""Requests under foreign names (DNS rebinding), and from pages of foreign origins."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec_nodes.cli import serve
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.http.access import AllowedHosts, read_hosts
from asyncspec_nodes.http.api.errors import ApiError
from toy_service import Toy

PATH = "/v1/completions"
ASK = {"model": "toy", "prompt": "hello", "max_tokens": 5}
FOREIGN = "rebound.example"


def accepted(hosts: AllowedHosts, header: str | None) -> bool:
    try:
        hosts.check(header)
    except ApiError as error:
        return error.status != 421
    return True


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", "/state", "/metrics", "/nowhere"])
async def test_a_foreign_name_is_refused_everywhere(path: str) -> None:
    async with Toy() as toy, aiohttp.ClientSession(toy.url) as web:
        async with web.get(path, headers={"Host": f"{FOREIGN}:{toy.port}"}) as reply:
            assert reply.status == 421
            error = (await reply.json())["error"]
            assert error["code"] == "unknown_host"
            assert f"--allow-host {FOREIGN}" in error["message"]
        async with web.options(
            path, headers={"Host": FOREIGN, "Access-Control-Request-Method": "POST"}
        ) as reply:
            assert reply.status == 421
        async with web.get(path, headers={"Host": f"localhost:{toy.port}"}) as reply:
            assert reply.status != 421


@pytest.mark.parametrize(
    "header",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST.",
        "127.0.0.1",
        "127.1.2.3:80",
        "[::1]:8000",
        "[::1]",
        "chat.localhost:1",
        None,
    ],
)
@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "0.0.0.0", "::", "192.0.2.1", "box"])
def test_loopback_names_are_always_accepted(bound: str, header: str | None) -> None:
    """``None``: only programs, not browsers, send none."""
    assert accepted(read_hosts(bound, []), header)


@pytest.mark.parametrize(
    "header",
    [
        FOREIGN,
        "127.0.0.1.rebound.example",
        "localhost.rebound.example",
        "192.0.2.1",
        "[2001:db8::1]",
        "",
        ":80",
        "[::1",
        "a b",
        "x" * 9000,
        "2130706433",
        "0x7f.1",
        "localhost@rebound.example",
    ],
)
def test_a_service_on_loopback_accepts_nothing_else(header: str) -> None:
    assert not accepted(read_hosts("127.0.0.1", []), header)


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.0.2.1", "box.example"])
def test_a_service_for_a_network_accepts_addresses_and_its_own_names(bound: str) -> None:
    """No address, as no name could be pointed elsewhere, is a rebound one."""
    hosts = read_hosts(bound, [])
    for header in ("192.0.2.1:8000", "[2001:db8::1]", socket.gethostname(), bound):
        assert accepted(hosts, f"[{header}]" if header == "::" else header)
    assert not accepted(hosts, FOREIGN)


def test_names_are_accepted_as_they_are_given() -> None:
    hosts = read_hosts("127.0.0.1", ["Chat.Example", "192.0.2.7"])
    assert accepted(hosts, "chat.example:443")
    assert accepted(hosts, "CHAT.example.")
    assert accepted(hosts, "192.0.2.7:80")
    assert not accepted(hosts, "sub.chat.example")
    assert accepted(read_hosts("127.0.0.1", ["*"]), FOREIGN)


@given(st.text(max_size=300))
def test_any_header_is_accepted_or_refused(header: str) -> None:
    accepted(read_hosts("127.0.0.1", []), header)


@pytest.mark.parametrize("given_name", ["", "a b", "http://box", "box:8000", "*.example", "a/b"])
def test_invalid_host_names_are_refused(given_name: str) -> None:
    with pytest.raises(UserError, match=r"--allow-host is .*; it must be a host name"):
        read_hosts("127.0.0.1", [given_name])


def test_where_there_are_keys_a_network_may_use_any_name(tmp_path: Path) -> None:
    """A page that was rebound has no key."""
    file = tmp_path / "keys"
    file.write_text("k\n")

    def hosts(*argv: str) -> AllowedHosts:
        parser = Parser()
        serve.add_arguments(parser)
        return serve.read_arguments(parser.parse_args(argv)).http.hosts

    keys = ("--api-key-file", str(file))
    assert accepted(hosts("--host", "0.0.0.0", *keys), FOREIGN)
    assert not accepted(hosts(*keys), FOREIGN)
    assert accepted(hosts(*keys, "--allow-host", FOREIGN), FOREIGN)
    assert not accepted(hosts("--host", "0.0.0.0", "--no-api-key"), FOREIGN)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("origins", "origin", "status"),
    [
        ((), "https://other.example", 403),
        ((), "null", 403),
        ((), "http://localhost:{other}", 403),
        ((), "http://127.0.0.1:{port}", 200),
        ((), "HTTP://127.0.0.1:{port}", 200),
        (("https://mine.example",), "https://mine.example", 200),
        (("https://mine.example",), "https://other.example", 403),
        (("https://mine.example",), "http://127.0.0.1:{port}", 200),
        (("*",), "https://other.example", 200),
        (("*",), "null", 200),
        ((), None, 200),
    ],
)
async def test_pages_of_foreign_origins_may_not_ask(
    origins: tuple[str, ...], origin: str | None, status: int
) -> None:
    async with Toy(origins=origins) as toy, aiohttp.ClientSession(toy.url) as web:
        headers = {}
        if origin is not None:
            headers["Origin"] = origin.format(port=toy.port, other=toy.port + 1)
        async with web.post(PATH, json=ASK, headers=headers) as reply:
            assert reply.status == status
            if status == 403:
                error = (await reply.json())["error"]
                assert error["code"] == "foreign_origin"
                assert f"--allow-origin {headers['Origin']}" in error["message"] or origin == "null"
        async with web.get("/v1/models", headers=headers) as reply:
            assert reply.status == 200  # its page does not get to see it
