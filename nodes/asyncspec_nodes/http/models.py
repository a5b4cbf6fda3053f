"""The models a service has: one."""

from __future__ import annotations

import time

from asyncspec_nodes.http.errors import ApiError


class Models:
    """The target under the name that clients use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._created = int(time.time())

    def check(self, name: str | None) -> None:
        """Raises ``ApiError`` for a name that is not served. Who says none means the only one."""
        if name and name != self.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this service has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def one(self) -> dict[str, object]:
        """``GET /v1/models/NAME``"""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "asyncspec",
        }

    def all(self) -> dict[str, object]:
        """``GET /v1/models``"""
        return {"object": "list", "data": [self.one()]}
