"""``GET /example/model`` names the model; ``POST /example/complete`` continues a text."""

from __future__ import annotations

from aiohttp import web

from asyncspec_nodes.http.api.completions import CompletionRequest
from asyncspec_nodes.http.dialects import Dialect, ServiceView


async def _model(service: ServiceView, request: web.Request) -> web.Response:
    service.check_loaded()
    return web.json_response({"example": service.model})


DIALECT = Dialect(
    endpoints={"/example/complete": CompletionRequest},
    routes={("GET", "/example/model"): _model},
)
