"""``asyncspec check``: every fault of a cluster file, and of what it names on this machine."""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from asyncspec.actor.link import Certificate
from asyncspec.backend.base import CPU
from asyncspec.backend.registry import LLAMA, backend_of
from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec.core.paths import expanded
from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.cluster import checkpoints, file, security
from asyncspec_nodes.cluster.config import AUTO, Config, NodeTable, layout
from asyncspec_nodes.cluster.control_groups import total_memory
from asyncspec_nodes.cluster.placement import check_spans, with_layers
from asyncspec_nodes.console.arguments import Parser, host_and_port
from asyncspec_nodes.console.bounds import GIB
from asyncspec_nodes.console.hosts import address, is_loopback
from asyncspec_nodes.console.interrupt import exit_on_interrupt
from asyncspec_nodes.node.processor import processor_here

LOOPBACK = "127.0.0.1"
"""Where HTTP listens without ``--http-host``."""


def add_arguments(parser: Parser) -> None:
    """Arguments of ``check``."""
    parser.add_argument("file", type=Path, metavar="FILE", help="cluster file")
    parser.add_argument(
        "--json", action="store_true", help='{"faults": [...], "processor": "..."} on stdout'
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code: 2 where there is a fault; each has a line."""
    config, faults = file.examine(arguments.file)
    if config is not None:
        with exit_on_interrupt():
            faults += list(faults_here(config))
    if arguments.json:
        report = {"faults": faults, "processor": processor_here()}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    elif faults:
        sys.stderr.writelines(f"{arguments.file}: {fault}\n" for fault in faults)
    else:
        sys.stdout.write(f"{arguments.file}: no fault found\nprocessor: {processor_here()}\n")
    return 2 if faults else 0


def faults_here(config: Config) -> Iterator[str]:
    """What a sound file names and nodes would refuse, or this machine does not have: models, keys,
    addresses, memory."""
    checks: tuple[Callable[[Config], Iterable[str] | None], ...] = (
        *(_path_problems, _target, _source, _template, _keys),
        *(_devices, _addresses, _port_problems, _stages),
    )
    # A target that is not there is a fault of its stages, too.
    reported: set[str] = set()
    for check in checks:
        for fault in _faults_of(check, config):
            if fault not in reported:
                reported.add(fault)
                yield fault


def _faults_of(check: Callable[[Config], Iterable[str] | None], config: Config) -> Iterator[str]:
    try:
        yield from check(config) or ()
    except AsyncSpecError as error:
        yield " ".join(str(error).split())


def _targets(config: Config) -> list[str]:
    """Targets of all nodes, each once."""
    return [*dict.fromkeys(config.target_of(node.rank) for node in config.node)]


def _path_problems(config: Config) -> Iterator[str]:
    """Names that are no paths for nodes started in another directory, but are for those here."""
    sources = checkpoints.parts(config.draft.source)
    models = [part.removeprefix(EAGLE_PREFIX) for part in sources if not checkpoints.is_name(part)]
    for model in dict.fromkeys([*_targets(config), *models]):
        name = model.removeprefix(f"{LLAMA}:")
        path = expanded(name)  # absolute where it is beside the file
        if not path.is_absolute() and os.path.exists(path):
            yield (
                f"{name} is in the working directory, and not beside the cluster file; give its "
                "absolute path, or start nodes elsewhere where it is a Hugging Face id"
            )


def _target(config: Config) -> None:
    for target in _targets(config):
        checkpoints.check_target(target, config.stages)


def _source(config: Config) -> None:
    if config.draft.source != checkpoints.AUTO:  # which takes what there is
        checkpoints.check_draft(config.draft.source, config.target.path)


def _template(config: Config) -> None:
    checkpoints.read_template(config.target.chat_template)


def _keys(config: Config) -> Iterator[str]:
    """Files that are missing, and why a peer with the same keys would be refused."""
    table = config.security
    if table is None:
        return
    if problems := list(security.file_problems(table)):
        yield from problems
        return
    keys = security.Keys(table)
    certificate = _shown(keys)
    if problem := keys.trust_problem(certificate):
        yield f"[security] certificate: the other nodes refuse this one: {problem}"
    elif not security.roles_of(certificate):
        yield f"[security] certificate: {security.NO_ROLE}"


def _shown(keys: security.Keys) -> Certificate:
    """The certificate that a peer is shown. Raises ``UserError`` where TLS refuses it."""
    assert keys.server is not None
    assert keys.client is not None
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = keys.client.wrap_bio(to_client, to_server)
    server = keys.server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    try:
        while waiting:
            side = waiting.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting.append(side)
    except ssl.SSLCertVerificationError as error:
        raise UserError(f"[security] certificate: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise UserError(f"[security] certificate: {error.reason}") from None
    return {**(server.getpeercert() or {}), "der": server.getpeercert(binary_form=True)}


def _addresses(config: Config) -> Iterator[str]:
    for host in dict.fromkeys(node.host for node in config.nodes):
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            yield f"{host} cannot be resolved here: {error.strerror}"


def _port_problems(config: Config) -> Iterator[str]:
    """Ports that two nodes of a machine would listen on, as far as their addresses tell machines
    apart."""
    seen: dict[tuple[object, ...], str] = {}
    for node in config.nodes:
        host, port = node.host, node.port
        if node.listen is not None:
            host, port = host_and_port(f"listen of rank {node.rank}:", node.listen)
        interface = address(host)
        if interface is not None and interface.is_unspecified:
            continue  # it may be in a container, whose ports are its own
        taken = [(f"rank {node.rank}", LOOPBACK if host == "localhost" else host, port)]
        if node.http is not None:
            taken.append((f"http of rank {node.rank}", LOOPBACK, node.http))
        # Machines behind one address may still differ in their private ones.
        machine = [None if is_loopback(name) else name for name in (node.host, host)]
        for whose, listening, number in taken:
            first = seen.setdefault((*machine, listening, number), whose)
            if first != whose:
                yield (
                    f"{first} and {whose} both take port {number} of {node.host}; change one of "
                    "them"
                )


def _stages(config: Config) -> Iterator[str]:
    """Settings that no stage accepts, and memory of those on this machine, as far as loopback
    addresses tell."""
    layers = backend_of(config.target.path).inspect(config.target.path).layers
    spans = layout(with_layers(config), layers)
    footprints = {}
    for target in _targets(config):
        check_spans(target, spans)
        footprints[target] = backend_of(target).footprints(target, spans, config.stage_options)
    host = total_memory()
    needed, there = Counter[str](), {"this machine": host}
    for node in _here(config):
        if node.rank:
            target = config.target_of(node.rank)
            backend = backend_of(target)
            engine = config.engine_of(node.rank)
            device, memory = backend.device_of(engine.device)
            if engine.gpu_layers >= 0:  # some are here
                memory = None
            where = "this machine" if memory is None else device
            there[where] = host if memory is None else memory.free
            runtime = backend.runtime_bytes if memory is None else 0
            needed[where] += footprints[target][node.rank - 1].weights + runtime
    for where, total in there.items():
        if needed[where] > total:
            yield (
                f"the stages on {where} need {needed[where] / GIB:.1f} GiB without caches; it has "
                f"{total / GIB:.1f}: put some elsewhere, or set [target] quantize"
            )


def _here(config: Config) -> list[NodeTable]:
    """The nodes on this machine, as far as loopback addresses tell."""
    return [node for node in config.nodes if is_loopback(node.host)]


def _devices(config: Config) -> None:
    """Raises ``UserError`` where a node here names a device that is not."""
    for node in _here(config):
        wanted = config.engine_of(node.rank).device
        if wanted not in (AUTO, CPU):
            backend_of(config.target_of(node.rank)).device_of(wanted)
