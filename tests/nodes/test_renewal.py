"""A running node reads its keys again."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from msgspec.structs import replace

from actor.local_cluster import QUICK, bound, hello
from asyncspec.actor.mesh import PLAIN, Mesh
from asyncspec.actor.routing import Host, Incoming
from asyncspec.core.errors import ClusterError
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import Keys
from asyncspec_nodes.node.renewal import renew
from asyncspec_nodes.plugins.join import key_folder
from certificates import make_keys


def test_changed_files_are_read_and_links_are_checked(tmp_path: Path) -> None:
    """Half of a new pair is logged once, and changes nothing."""
    make_keys(tmp_path, "box", "new")
    keys = Keys(SecurityTable(*(str(tmp_path / n) for n in ("ca.pem", "box.pem", "box.key"))))
    reported: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def note(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
        reported.put_nowait((event.pop("event"), dict(event)))
        raise structlog.DropEvent

    log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[note])
    checked: asyncio.Queue[None] = asyncio.Queue()

    async def main() -> None:
        await renew(PLAIN, lambda: None, log, 0.001)
        task = asyncio.create_task(renew(keys, lambda: checked.put_nowait(None), log, 0.001))
        shutil.copy(tmp_path / "new.pem", tmp_path / "box.pem")
        os.utime(tmp_path / "box.pem", ns=(1, 1))
        event, fields = await asyncio.wait_for(reported.get(), 240)
        assert event == "keys not renewed"
        assert "do not fit together" in fields["why"]
        assert checked.empty()
        shutil.copy(tmp_path / "new.key", tmp_path / "box.key")
        assert await asyncio.wait_for(reported.get(), 240) == ("keys renewed", {})
        await asyncio.wait_for(checked.get(), 240)
        assert reported.empty()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_a_client_leaves_a_draft_node_whose_certificate_is_revoked(tmp_path: Path) -> None:
    make_keys(tmp_path, "draft=node:0", "front=client", "other=client")
    key_folder.revoke(tmp_path, ["other"])
    table = SecurityTable(*(str(tmp_path / n) for n in ("ca.pem", "draft.pem", "draft.key")))
    named = {"certificate": "front.pem", "key": "front.key", "crl": "crl.pem"}
    mine = replace(table, **{field: str(tmp_path / name) for field, name in named.items()})

    async def main() -> None:
        sock, me = bound(), hello(0, 1)
        mesh = Mesh(me, {}, Incoming(lambda event: None, None, Host(), me), QUICK, Keys(table))
        await mesh.start(sock)
        host, port = sock.getsockname()
        where = ClusterAddress(host, port, "toy", mine)
        lost: asyncio.Queue[str] = asyncio.Queue()
        async with ReconnectingEngine(
            where.connect, notify=lost.put_nowait, renewal_seconds=0.001
        ) as engine:
            link = engine.client.link
            (tmp_path / "crl.pem").write_bytes(b"half")
            assert (await asyncio.wait_for(lost.get(), 240)).startswith("keys not renewed: ")
            assert not link.gone.done()
            (tmp_path / "crl.pem").unlink()
            key_folder.revoke(tmp_path, ["draft"])
            said = await asyncio.wait_for(lost.get(), 240)
            assert said == "the draft node is gone: its certificate is revoked"
            with pytest.raises(ClusterError, match="its certificate is revoked"):
                await engine.nodes()
        await mesh.close("over")

    asyncio.run(main())
