"""``asyncspec serve``: its arguments, and what can be said against them before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import UserError
from asyncspec_nodes.cli import local_options
from asyncspec_nodes.client import remote
from asyncspec_nodes.client.remote import ClusterAddress
from asyncspec_nodes.cluster.chat_templates import PLAIN, read_template
from asyncspec_nodes.cluster.config import GENERATION_CONFIGS, Config
from asyncspec_nodes.console import arguments as numbers
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.http import options as http_options
from asyncspec_nodes.http.options import HttpOptions
from asyncspec_nodes.serving.requests import read_defaults

SESSIONS = 4
"""Requests that a local cluster works on at a time; the others wait in its queue."""


class ServeOptions(Struct, frozen=True):
    """Everything ``serve`` needs, checked."""

    host: str
    port: int
    http: HttpOptions
    # A cluster to start here, or one to connect to.
    where: Config | ClusterAddress
    logs: Path | None
    # For the products of each node of a cluster that is started here; None: as it is set.
    threads: int | None


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec serve``."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help="default: 127.0.0.1")
    add("--port", type=int, default=8000, metavar="PORT", help="default: 8000; 0: any free one")
    http_options.add_arguments(parser)
    add(
        "--chat-template",
        metavar=f"FILE|{PLAIN}",
        help="in place of the chat template of the target's tokenizer (docs/reference/http.md)",
    )
    add(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        help="auto: requests that leave sampling settings out get what the target's "
        "generation_config.json recommends; none: OpenAI's defaults (default: auto)",
    )
    add("--sessions", type=int, default=SESSIONS, metavar="N", help=f"default: {SESSIONS}")
    local_options.add_arguments(parser)
    remote.add_arguments(parser)


def read_arguments(arguments: argparse.Namespace) -> ServeOptions:
    """Checked options. Raises ``UserError``."""
    if not 0 <= arguments.port < 65536:
        raise UserError(f"--port is {arguments.port}; it must be 0 to 65535")
    numbers.COUNT.check("--sessions", arguments.sessions)
    http = http_options.read_arguments(arguments, arguments.host)
    return ServeOptions(
        host=arguments.host,
        port=arguments.port,
        http=replace(http, model=http.model or _hub_name(arguments.target)),
        where=_remote(arguments) if remote.wanted(arguments) else _local(arguments),
        logs=local_options.folder(arguments.log_dir),
        threads=arguments.threads,
    )


def _hub_name(target: str | None) -> str | None:
    """What a target from the Hub is called, as with a cluster file: its download's directory bears
    the name of a commit. None: any other target."""
    if target is None or Path(target).expanduser().is_dir():
        return None
    return backend_of(target).model_name(target)


def _remote(arguments: argparse.Namespace) -> ClusterAddress:
    local_options.refuse(arguments)
    for name in ("chat_template", "generation_config", "policy"):
        if getattr(arguments, name) is not None:
            option = name.replace("_", "-")
            raise UserError(f"--{option} is the running cluster's choice; leave it out")
    return remote.read_arguments(arguments)


def _local(arguments: argparse.Namespace) -> Config:
    template = arguments.chat_template
    if template is None and arguments.target is None:
        template = PLAIN  # the bundled target was not made for conversations
    read_template(template)
    if template not in (None, PLAIN):
        template = str(Path(template).absolute())
    config = local_options.read_arguments(arguments, sessions=arguments.sessions)
    which = arguments.generation_config or "auto"
    target = replace(config.target, chat_template=template, generation_config=which)
    read_defaults(target.path, target.generation_config)
    return replace(config, target=target)
