"""A running node reads its keys again."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import structlog

from asyncspec.actor.mesh import PLAIN
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import Keys
from asyncspec_nodes.node.renewal import renew

SCRIPT = Path(__file__).parents[2] / "nodes" / "examples" / "make-keys.sh"


def test_changed_files_are_read_and_links_are_checked(tmp_path: Path) -> None:
    """Half of a new pair is logged once, and changes nothing."""
    subprocess.run(["bash", SCRIPT, tmp_path, "box", "new"], check=True, capture_output=True)
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
        event, fields = await asyncio.wait_for(reported.get(), 60)
        assert event == "keys not renewed"
        assert "do not fit together" in fields["why"]
        assert checked.empty()
        shutil.copy(tmp_path / "new.key", tmp_path / "box.key")
        assert await asyncio.wait_for(reported.get(), 60) == ("keys renewed", {})
        await asyncio.wait_for(checked.get(), 60)
        assert reported.empty()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
