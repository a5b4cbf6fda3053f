"""``python tools/clients [NAME ...]``: install them, run them, and write the table of results."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec_nodes.console.arguments import Parser
from tools.bench.docs.results import FOLDER, Column, Results, Table, load
from tools.bench.recording import origin, write
from tools.clients import service
from tools.clients.catalogue import CAPABILITIES, CLIENTS, Capability, Client
from tools.clients.checks import check_all
from tools.clients.environments import PROJECT, Failure, install, install_node, run, version

ROOT = PROJECT / ".clients"
RESULTS = FOLDER / "clients.json"
"""The last run of each client."""

CAPTION = (
    "Programs unmodified, each against serve on loopback, with a tiny target whose answers are "
    "dictated; -: it does not do that"
)
HEADS = ("client", "version", "interface", *CAPABILITIES.values())
NOT_RUN = "not run"


def parser() -> Parser:
    """The command line."""
    made = Parser(prog="clients", description=__doc__)
    made.add_argument("names", nargs="*", metavar="NAME", help="default: all clients")
    made.add_argument("--installed", action="store_true", help="install only what is not there")
    made.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    made.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 everything passed, 1 something failed, 2 a user's mistake."""
    options = parser().parse_args(argv)
    try:
        if options.serve is not None:
            return service.main(ROOT / "target", options.serve, ROOT / "edited")
        chosen = _chosen(options.names)
        if options.isolated:
            return _run(chosen)
        _install(chosen, only_missing=options.installed)
        again = [sys.executable, str(Path(__file__).parent), "--isolated", *options.names]
        return subprocess.call([*_isolation(), *again])
    except AsyncSpecError as error:
        print(f"clients: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def _chosen(names: Sequence[str]) -> list[Client]:
    clients = {client.slug: client for client in CLIENTS}
    if unknown := [name for name in names if name not in clients]:
        raise UserError(f"there is no client {unknown[0]!r}; there are {', '.join(clients)}")
    return [clients[name] for name in names] or list(CLIENTS)


def _install(clients: Sequence[Client], *, only_missing: bool) -> None:
    """What cannot be installed is told, and not run."""
    install_node(ROOT)
    for client in clients:
        try:
            if only_missing:
                with contextlib.suppress(OSError, Failure):
                    print(f"{client.name} {version(client, ROOT)}", flush=True)
                    continue
            print(f"{client.name} {install(client, ROOT)}", flush=True)
        except Failure as error:
            print(f"{client.name} cannot be installed: {error}", flush=True)
    # A project of its own: agents read what lies in theirs.
    run(["git", "init", "--quiet", "edited"], ROOT)
    if not (ROOT / "target").exists():
        service.make_target(ROOT / "target")


def _isolation() -> list[str]:
    """What runs a command in a network namespace with loopback alone, as far as this user may."""
    up = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    for options in (["--net"], ["--net", "--map-root-user"]):
        words = ["unshare", *options, *up]
        with contextlib.suppress(OSError):
            if not subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
                return words
    print("no network namespace (unshare, ip): the clients can reach the network", flush=True)
    return []


def _run(clients: Sequence[Client]) -> int:
    rows = dict(_earlier())
    good = True
    with _service() as url:
        for client in clients:
            try:
                release = version(client, ROOT)
            except (OSError, Failure):
                print(f"{client.name}: not installed", flush=True)
                rows[client.name] = _row(client, "", dict.fromkeys(CAPABILITIES, NOT_RUN))
                _write([rows[client.name] for client in CLIENTS if client.name in rows])
                good = False
                continue
            problems = check_all(client, ROOT, url, ROOT / "edited")
            for capability, problem in problems.items():
                print(f"{client.name}: {capability}: {problem or 'yes'}", flush=True)
            good = good and not any(problems.values())
            cells = {name: "**no**" if text else "yes" for name, text in problems.items()}
            rows[client.name] = _row(client, release, cells)
            _write([rows[client.name] for client in CLIENTS if client.name in rows])
    return 0 if good else 1


@contextlib.contextmanager
def _service() -> Iterator[str]:
    """A service on any free port: its address."""
    log = ROOT / "service.txt"
    command = [sys.executable, str(Path(__file__).parent), "--serve", "0"]
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            while (found := re.search(r"serving \S+ on (\S+)", log.read_text())) is None:
                if process.poll() is not None:
                    raise Failure(f"the service has ended; {log}")
                time.sleep(0.2)
            with urllib.request.urlopen(f"{found[1]}/ready"):
                yield found[1]
        finally:
            process.send_signal(signal.SIGINT)


def _row(client: Client, release: str, cells: Mapping[Capability, str]) -> tuple[str, ...]:
    """``cells``: by capability, for those that the client has."""
    shown = (cells.get(name, "-") for name in CAPABILITIES)
    return (client.name, release, client.interface, *shown)


def _earlier() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Rows of earlier runs, by client."""
    if RESULTS.exists():
        table = load(RESULTS).tables["clients"]
        for row in table.rows:
            cells = {
                column.name: str(cell) for column, cell in zip(table.columns, row, strict=True)
            }
            yield str(row[0]), tuple(cells.get(head, "-") for head in HEADS)


def _write(rows: Sequence[tuple[str, ...]]) -> None:
    table = Table(tuple(map(Column, HEADS)), tuple(rows), CAPTION)
    write(RESULTS, Results(**origin("make clients"), tables={"clients": table}))
