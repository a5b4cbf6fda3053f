"""``asyncspec serve --background`` and ``--stop``."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from asyncspec.core.errors import ClusterError, UserError, writing
from asyncspec_nodes.console.arguments import print_notice
from asyncspec_nodes.console.waiting import Waiting
from asyncspec_nodes.local import service_file
from asyncspec_nodes.local.service_file import ServiceState

OPTION, CHILDS_OPTION = "--background", "--detached"
"""The user's option, and that of the process which it starts."""

LOG_BYTES = 4 << 20
LOG_SECONDS = 10.0
"""The length of a log is looked at so often."""

LOOK_SECONDS = 0.05
"""Between looks at the file of a service that starts or ends."""


def start(command_line: Sequence[str], port: int) -> int:
    """Start the service of a command line in a session of its own, which a closing terminal does
    not end, and wait until it serves. Returns its exit code where it ends. Raises ``UserError``
    where there is one on that ``port`` (0: any)."""
    for state in service_file.running():
        if port and state.port == port:
            raise UserError(
                f"a service in the background is on port {port} already "
                f"({name_of(state)}); asyncspec serve --stop ends it"
            )
    path = service_file.log_path(port)
    with writing(str(path)):
        service_file.make_folder()
        # To the end, also after ``bound_log``.
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = os.open(path, how | (os.O_TRUNC if port else 0), 0o600)
    try:
        with writing(str(path)):  # else nobody would learn why a service on a full disk ends
            os.write(log, f"{time.strftime('%F %T')} a service starts\n".encode())
        begin = os.fstat(log).st_size
        process = subprocess.Popen(
            # -P: a file in the user's directory must not stand in for a module.
            [
                *(sys.executable, "-P", "-m", "asyncspec_nodes.cli.main"),
                *(CHILDS_OPTION if word == OPTION else word for word in command_line),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    return _until_it_serves(process, path, begin)


def _until_it_serves(process: subprocess.Popen[bytes], log: Path, begin: int) -> int:
    try:
        with Waiting("the service starts") as waiting:
            while process.poll() is None:
                state = service_file.state_of(process.pid)
                if state is not None and not state.pending:
                    break
                if state is not None:
                    waiting.say(state.pending)
                time.sleep(LOOK_SECONDS)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode is not None:
        sys.stderr.buffer.write(log.read_bytes()[begin:])
        return process.returncode or 1
    assert state is not None
    process.returncode = 0  # it goes on, and nothing waits for it
    print_notice(
        f"serving {state.model} on {state.url} in the background, for asyncspec run and chat too; "
        f"log: {log}; asyncspec serve --stop ends it"
    )
    return 0


def bound_log(port: int, descriptor: int = 2, limit: int = LOG_BYTES) -> None:
    """Begin the log of this process, a service that was asked for ``port``, anew where it is longer
    than ``limit`` bytes; what it has is kept as FILE.1 until the next time."""
    path = service_file.log_path(port)
    with suppress(OSError):  # it is not there, or not this process's
        status = os.fstat(descriptor)
        if status.st_size <= limit or not os.path.samestat(status, path.stat()):
            return
        try:
            shutil.copyfile(path, path.with_suffix(".log.1"))
        finally:  # also on a full disk
            os.ftruncate(descriptor, 0)


async def keep_log_bounded(port: int) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(LOG_SECONDS)
        bound_log(port)


def stop() -> int:
    """End this user's services in the background. Raises ``ClusterError`` where one does not."""
    states = service_file.running()
    for state in states:
        name = name_of(state)
        with suppress(ProcessLookupError):
            os.kill(state.pid, signal.SIGTERM)
        until = time.monotonic() + state.stop_seconds
        with Waiting(f"the service on port {state.port} ends its answers"):
            while service_file.is_running(state):
                if time.monotonic() > until:
                    raise ClusterError(
                        f"the service on port {state.port} has not ended within "
                        f"{state.stop_seconds:g} s; kill -9 {state.pid} ends it"
                    )
                time.sleep(LOOK_SECONDS)
        print_notice(f"the service on port {state.port} has ended ({name})")
    if not states:
        print_notice("no service runs in the background")
    return 0


def name_of(state: ServiceState) -> str:
    """What serves, for people."""
    what = state.model or state.pending
    return f"{what}, started {state.age()}, process {state.pid}"
