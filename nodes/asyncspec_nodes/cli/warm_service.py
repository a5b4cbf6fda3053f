"""The service in the background that ``asyncspec run`` and ``chat`` ask in place of a cluster of
their own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster.checkpoints import AUTO, BUNDLED_TARGET, NONE, PLAIN
from asyncspec_nodes.cluster.config import DRAFTING, PASSES, Config
from asyncspec_nodes.console.arguments import Parser, given, option, print_notice
from asyncspec_nodes.console.waiting import Waiting
from asyncspec_nodes.local import service_file
from asyncspec_nodes.local.service_file import ServiceState
from asyncspec_protocol.ids import DRAFT

OWN = (
    *("trace", "check", "log_dir", "threads", "retest", "source_apart", "draft_learn"),
    *PASSES,
    *DRAFTING,
)
"""Arguments that only a cluster of the command's own can have."""

COMPARED = ("stages", "draft", "policy", "ctx_size", "device", "gpu_layers", "repack")
"""Arguments that a service must have where the user has given them; where not, it may have any."""


LOOK_SECONDS = 0.05
"""Between looks at the file of a service that loads."""

LOAD_SECONDS = 600.0
"""For a service to load."""


class WarmService(Struct, frozen=True):
    """A service that serves what is asked for."""

    address: ClusterAddress
    config: Config
    # What its stages hold: "bitwise" or "tolerance".
    guarantee: str
    # The policy that requests name; empty: the service's.
    policy: str

    @property
    def has_plain_template(self) -> bool:
        """Whether conversations become plain text there, as of the bundled target."""
        return self.config.target.chat_template == PLAIN


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--no-service",
        action="store_true",
        help="start a cluster here even where a service of asyncspec serve --background has the "
        "model",
    )


def find(arguments: argparse.Namespace, wanted: Config) -> WarmService | None:
    """The service that serves what is ``wanted``, by the arguments; a line says so, or why there is
    none where a service runs."""
    if arguments.no_service:
        return None
    explicit = set(given(arguments, OWN + COMPARED))
    if arguments.draft == AUTO:
        explicit.remove("draft")
    why = ""
    for service in service_file.running():
        state, reason = service, misfit(wanted, explicit, service)
        if state.pending and not reason:
            state = _loaded(state)
            reason = state.pending or misfit(wanted, explicit, state)
        if reason:
            why = why or f"the service on port {state.port} is not used: {reason}"
        elif service_file.last_change(wanted.target.path) > state.target_changed:
            why = f"the service on port {state.port} is not used: the model's files have changed"
        else:
            assert state.config is not None
            draft, age = state.config.at(DRAFT), state.age()
            print_notice(
                f"using the service on port {state.port}, started {age}; --no-service starts a "
                "cluster of its own"
            )
            return WarmService(
                ClusterAddress(draft.host, draft.port, state.config.cluster.name),
                state.config,
                state.guarantee,
                wanted.draft.policy if explicit & {"draft", "policy"} else "",
            )
    if why:
        print_notice(why)
    return None


def _loaded(state: ServiceState) -> ServiceState:
    """A service that loads, once it serves: waited for, as it is nearer to that than a cluster that
    is started now. Where it ends, or takes too long, its ``pending`` says so."""
    print_notice(
        f"the service on port {state.port} still loads, and is waited for; --no-service starts a "
        "cluster of its own"
    )
    until = time.monotonic() + LOAD_SECONDS
    with Waiting(f"the service on port {state.port} loads") as waiting:
        while service_file.is_running(state):
            # None while it is just changing its file.
            state = service_file.state_of(state.pid) or state
            if not state.pending:
                return state
            if time.monotonic() > until:
                return replace(state, pending=f"it has not loaded in {LOAD_SECONDS:g} s")
            waiting.say(state.pending)
            time.sleep(LOOK_SECONDS)
    return replace(state, pending="it has ended before it served")


def misfit(wanted: Config, explicit: Collection[str], state: ServiceState) -> str:
    """Why a service cannot take the place of a cluster that is ``wanted``; empty where it can. What
    changes the text must be the same; what changes the speed, where it is among the ``explicit``
    arguments."""
    if state.version != service_file.program_version():
        return f"it is of version {state.version}; asyncspec serve --stop ends it"
    if state.config is None:
        return "it serves a cluster of other machines"
    if state.config.target.path != wanted.target.path:
        return f"it serves {state.model or 'another model'}"
    if names := [name for name in OWN if name in explicit]:
        return f"{option(names[0])} needs a cluster of its own"
    return next(_differences(wanted, explicit, state.config), "")


def _differences(wanted: Config, explicit: Collection[str], served: Config) -> Iterator[str]:
    """What a service of the same target has otherwise, as the user writes it."""
    bundled = Path(wanted.target.path) == BUNDLED_TARGET
    for key, asked, has in (
        ("dtype", wanted.target.dtype, served.target.dtype),
        ("mode", wanted.target.mode, served.target.mode),
        ("quantize", wanted.target.quantize, served.target.quantize),
        ("generation_config", wanted.target.generation_config, served.target.generation_config),
        ("kv_type", wanted.engine.kv_type, served.engine.kv_type),
        ("flash_attention", wanted.llama.flash_attention, served.llama.flash_attention),
        ("stages", wanted.stages, served.stages),
        ("device", wanted.engine.device, served.engine.device),
        ("gpu_layers", wanted.llama.gpu_layers, served.llama.gpu_layers),
        ("repack", wanted.llama.repack, served.llama.repack),
    ):
        if asked != has and (key in explicit or key not in COMPARED):
            yield f"it has {option(key)} {has}"
    if not bundled and wanted.target.chat_template != served.target.chat_template:
        yield "it has another --chat-template"
    if served.pace:
        yield "it emulates slower devices"
    # Without a draft the policy alone, which every request names, makes the text as it is wanted.
    source = wanted.draft.source
    if "policy" in explicit and source != NONE == served.draft.source:
        yield f"it has no draft for --policy {wanted.draft.policy}"
    elif "draft" in explicit and source not in (served.draft.source, NONE):
        yield f"it has --draft {served.draft.source}"
    limit = served.limits.context
    if "ctx_size" in explicit and 0 < limit < wanted.limits.context:
        yield f"it has --ctx-size {limit}"
