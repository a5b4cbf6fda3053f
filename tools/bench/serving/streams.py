"""Streamed completions as a client sees them: when each token comes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from typing import Any

from asyncspec.core.errors import ClusterError
from tools.bench.serving.service import Service, answered

DATA, DONE = b"data: ", b"[DONE]"


async def stream(service: Service, **fields: Any) -> AsyncGenerator[tuple[float, int], None]:
    """The tokens of an answer as they come: ``time.monotonic``, and how many. Leaving early closes
    the connection. Raises ``ClusterError``."""
    body = {"model": service.model, "stream": True, "return_details": True, **fields}
    async with service.web.post("/v1/completions", json=body) as reply:
        await answered(reply)
        async for line in reply.content:
            if not line.startswith(DATA) or line.startswith(DATA + DONE):
                continue
            event = json.loads(line.removeprefix(DATA))
            if "error" in event:
                raise ClusterError(event["error"]["message"])
            count = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            if count:
                yield time.monotonic(), count
