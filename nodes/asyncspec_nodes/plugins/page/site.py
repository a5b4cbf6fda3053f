"""The web page at /: static files under a strict content security policy."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

from asyncspec_nodes.http.dialects import Dialect, Handler, ServiceView

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
SCRIPTS = (
    *("app", "chat", "cluster", "markdown", "passes"),
    *("render", "settings", "store", "stream"),
)
FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/text.css": ("text.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
}


def _file(name: str, kind: str) -> Handler:
    body = (files("asyncspec_nodes.plugins.page") / name).read_bytes()

    async def serve(service: ServiceView, request: web.Request) -> web.Response:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return serve


PAGE = Dialect(
    routes={("GET", path): _file(name, kind) for path, (name, kind) in FILES.items()},
    public=frozenset(FILES),
)
