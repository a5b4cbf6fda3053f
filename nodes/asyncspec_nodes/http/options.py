"""Command-line options of every command that serves HTTP."""

from __future__ import annotations

import argparse
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.security import file_problem, load_chain
from asyncspec_nodes.console.arguments import Parser, option
from asyncspec_nodes.console.bounds import BYTES, COUNT, POSITIONS, SOME_SECONDS
from asyncspec_nodes.console.hosts import is_loopback
from asyncspec_nodes.http.access import ServiceOptions, read_hosts, read_origins
from asyncspec_nodes.http.keys import read_keys
from asyncspec_nodes.http.limits import Limits


class HttpOptions(ServiceOptions, frozen=True):
    # The model's public names, the canonical one first; empty: the name of its directory.
    models: tuple[str, ...] = ()
    # None: plain HTTP.
    tls: ssl.SSLContext | None = None


class _Key(argparse.Action):
    """Collects keys; commas of one in the environment are its own."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), value))


class HttpSocket(NamedTuple):
    """HTTP options and a listening socket."""

    options: HttpOptions
    sock: socket.socket


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--served-model-name",
        "--model-name",
        action="append",
        metavar="NAME",
        help="a name of the model in the API; may be given several times: requests may use any of "
        "them, and answers state the first (default: the name of the target's directory)",
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key",
        action=_Key,
        default=(),
        metavar="KEY",
        help="a key that opens the service; may be given several times",
    )
    keys.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="keys that open the service, one a line, each with its name and limits "
        "(docs/reference/http.md)",
    )
    add(
        "--share-prefixes",
        choices=("per-key", "all"),
        default="per-key",
        help="which requests reuse the computed prefix of each other's prompts, and (suffix) each "
        "other's answers: those of one API key, or all, which lets every key find out what others "
        "ask (default: per-key)",
    )
    add("--tls-certificate", type=Path, metavar="FILE", help="serve HTTPS with this chain (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    add("--no-api-key", action="store_true", help="no key is asked for")
    add(
        "--public-metrics",
        action="store_true",
        help="serve /metrics without an API key, but for what names keys",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests for this name of the service, or for any (*); may be given several "
        "times (default: localhost and loopback addresses; with --host beyond loopback any "
        "address and this machine's name, and with API keys any name)",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin (https://HOST, or *) use the service from a browser; may be "
        "given several times (default: none but its own)",
    )
    for prefix, field, bounds, text in (
        ("max_", "concurrent", COUNT, "answers at a time; a further request gets a 429"),
        ("max_", "body_bytes", BYTES, "of a request"),
        ("max_", "prompt_length", POSITIONS, "in characters, or in tokens"),
        ("", "answer_seconds", SOME_SECONDS, "for an answer to be complete"),
        ("", "drain_seconds", SOME_SECONDS, "for running answers when told to stop"),
    ):
        default = getattr(Limits(), field)
        metavar = "N" if isinstance(default, int) else "S"
        text = f"{text} (default: {str(default).removesuffix('.0')})"
        bounds.add_to(parser, option(prefix + field), metavar, text, dest=field, default=default)


def read_arguments(
    arguments: argparse.Namespace, host: str, *, closed: bool = False
) -> HttpOptions:
    """Checked options of a service on ``host``; ``closed``: one that has nothing to protect but
    metrics, which beyond loopback are not served without keys or --public-metrics. Raises
    ``UserError``."""
    keys = read_keys(
        arguments.api_key_file,
        arguments.api_key,
        share_prefixes=arguments.share_prefixes == "all",
    )
    opened = arguments.no_api_key or (closed and arguments.public_metrics)
    if not keys and not opened and not is_loopback(host):
        raise UserError(
            f"{host} is not a loopback address: give --api-key KEY or --api-key-file FILE, or "
            f"{'--public-metrics' if closed else '--no-api-key'} on a network you trust"
        )
    if keys and arguments.no_api_key:
        raise UserError("--no-api-key is given, but there is an API key; leave one out")
    return HttpOptions(
        keys=keys,
        hosts=read_hosts(host, arguments.allow_host, keys=bool(keys)),
        origins=read_origins(arguments.allow_origin),
        limits=msgspec.convert(arguments, Limits, from_attributes=True),
        public_metrics=arguments.public_metrics,
        models=_names(arguments.served_model_name or ()),
        tls=server_context(arguments.tls_certificate, arguments.tls_key),
    )


def _names(names: Sequence[str]) -> tuple[str, ...]:
    """Each once. Raises ``UserError``."""
    if "" in names:
        raise UserError("--served-model-name is empty; give a name, or leave it out")
    return tuple(dict.fromkeys(names))


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """TLS context of a certificate chain and key (PEM); None without. Raises ``UserError``."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UserError("--tls-certificate and --tls-key belong together; give both")
    for name, path in (("--tls-certificate", certificate), ("--tls-key", key)):
        if problem := file_problem(name, path):
            raise UserError(problem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        load_chain(context, certificate, key, "--tls-key")
    except (ssl.SSLError, OSError) as error:
        why = getattr(error, "reason", None) or error
        raise UserError(f"--tls-certificate and --tls-key do not fit together: {why}") from None
    return context
