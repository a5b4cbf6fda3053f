"""HTTP dialects: the interfaces of a service, by name. Packages register a ``Dialect`` under the
entry point group ``asyncspec.http``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from aiohttp import web
from msgspec import Struct

from asyncspec.registry import Registry
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.messages import Submit

T = TypeVar("T")


class ServiceView(Protocol):
    """What handlers of a dialect's routes may use of the service."""

    options: ServiceOptions
    # The public names of the model, and when it was loaded (seconds since the epoch).
    models: tuple[str, ...]
    created: int

    @property
    def model(self) -> str:
        """The first name, which answers state."""

    def check_loaded(self) -> None:
        """Raises ``ApiError`` while the service is loading: no model is served yet."""

    def check_model(self, name: str) -> None:
        """Raises ``ApiError`` for another model's name."""

    def note(self, names: Sequence[str]) -> None:
        """Log the names of what a request asks for and the answer leaves out."""

    async def beside(self, body: bytes, work: Callable[[], T]) -> T:
        """What ``work`` makes of a request's body: of a large one on a thread, as other answers
        wait for the event loop."""

    async def context(self, request: web.Request, model: str | None) -> RequestContext:
        """The context of a request for the model ``model``. Raises ``ApiError``."""

    async def read_prompt(self, submit: Submit, name: str) -> ChoiceBuffer:
        """The tokens and the text that the draft node makes of a prompt, the parameter ``name``.
        Raises ``ApiError``."""

    async def chat_facts(self) -> ChatFacts:
        """What the target's chat template can do. Raises ``ClusterError``."""

    async def context_length(self) -> int:
        """In tokens; 0 where the draft node does not answer. Raises ``ClusterError``."""


Handler = Callable[[ServiceView, web.Request], Awaitable[web.StreamResponse]]


class Dialect(Struct, frozen=True, kw_only=True):
    """The routes of one interface."""

    # ``POST`` routes that answer, and the structs of their bodies. A body has ``model``,
    # ``check()`` and ``call(RequestContext)``, which returns what is asked of the cluster and how
    # its tokens are written (``asyncspec_nodes.http.api.answers``).
    endpoints: Mapping[str, type[Any]] = {}
    # All other routes, by method and path.
    routes: Mapping[tuple[str, str], Handler] = {}
    # Paths among them that need no key and are logged at level debug: files of a page.
    public: frozenset[str] = frozenset()


DIALECTS: Registry[Dialect] = Registry("asyncspec.http", "HTTP dialect", Dialect)
"""The installed dialects."""


def endpoints(dialects: Iterable[Dialect]) -> dict[str, type[Any]]:
    """The routes that answer, and the structs of their bodies."""
    return {path: body for dialect in dialects for path, body in dialect.endpoints.items()}
