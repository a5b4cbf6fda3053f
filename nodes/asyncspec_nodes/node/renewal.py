"""Certificates and revocation lists are read again while a node runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncspec.actor.mesh import Security
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.security import Keys

CHECK_SECONDS = 5.0
"""Between looks at the files."""


async def renew(
    security: Security, check: Callable[[], None], log: Any, every: float = CHECK_SECONDS
) -> None:
    """Read the files again when they have changed, and ``check`` the links; what does not fit
    together, as while one of them is being replaced, is logged once and changes nothing. Ends at
    once without keys."""
    if not isinstance(security, Keys):
        return
    refused = ""
    while True:
        await asyncio.sleep(every)
        if not security.changed():
            continue
        try:
            security.reload()
        except UserError as error:
            if str(error) != refused:
                refused = str(error)
                log.error("keys not renewed", why=refused)
            continue
        refused = ""
        log.info("keys renewed")
        check()
