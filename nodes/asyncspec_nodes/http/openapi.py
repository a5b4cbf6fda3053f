"""``/openapi.json``: the endpoints and the bodies that they take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def description(endpoints: Mapping[str, type[Any]], version: str) -> dict[str, object]:
    """An OpenAPI document."""
    bodies, components = msgspec.json.schema_components(
        endpoints.values(),
        # What may be of any type.
        schema_hook=lambda _: {"description": "any value"},
        ref_template="#/components/schemas/{name}",
    )
    paths = {
        path: {
            "post": {
                "operationId": path.strip("/").replace("/", "_"),
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": body}},
                },
                "responses": {
                    "200": {"description": "the answer, or a stream of it"},
                    "400": {"description": "the request must change; error.param names what"},
                },
            }
        }
        for path, body in zip(endpoints, bodies, strict=True)
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "asyncspec", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
