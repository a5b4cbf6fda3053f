"""What ``asyncspec up`` keeps from one run to the next, so that its token stays the same: then the
machines that have joined find it again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.security import NODE, OPERATOR
from asyncspec_nodes.join.authority import Authority, make_key, make_request
from asyncspec_nodes.join.token import SECRET_BYTES


class Kept(Struct):
    """The cluster's keys, PEM: whoever reads them can be any of its machines."""

    authority_key: str
    authority: str
    # Of the machine that the cluster is started on.
    key: str
    certificate: str
    # Of the token.
    secret: bytes
    # Where machines join; 0: none yet.
    port: int = 0


def new_cluster(name: str) -> Kept:
    """Of a cluster that has no machines. ``name``: of the one that it is started on."""
    authority, key = Authority.new(), make_key()
    certificate = authority.issue(make_request(key, name), NODE, OPERATOR)
    return Kept(authority.key, authority.pem, key, certificate, secrets.token_bytes(SECRET_BYTES))


def default_file(environment: Mapping[str, str]) -> Path:
    """Where it is kept without ``--token-file``."""
    state = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "asyncspec" / "up.json"


class KeptFile:
    """``with``: locked, so that two clusters at a time never share it. Where it cannot be used
    ``say`` is told why, and nothing is kept. ``new``: earlier tokens are void."""

    def __init__(self, file: Path | None, say: Callable[[str], None], *, new: bool = False) -> None:
        self._file = file
        self._say = say
        self._new = new
        self._descriptor: int | None = None

    def __enter__(self) -> KeptFile:
        if self._file is None:
            return self
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            self._say(
                f"another cluster runs with the token of {self._file}: this one's ends with it; "
                "--token-file FILE keeps both"
            )
        except OSError as error:
            self._close()
            self._say(
                f"{self._file} cannot be written ({error.strerror}): the token ends with this "
                "cluster; --token-file FILE keeps it elsewhere"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self) -> Kept | None:
        """None where nothing is kept, or not to be used. Raises ``UserError``."""
        if self._descriptor is None or self._new:
            return None
        data = os.pread(self._descriptor, 1 << 20, 0)
        if not data:
            return None
        try:
            kept = msgspec.json.decode(data, type=Kept)
            Authority(kept.authority_key, kept.authority)
        except (msgspec.MsgspecError, ValueError):
            raise UserError(
                f"{self._file} is damaged; remove it, or give --new-token, and run the join "
                "command that is printed then on the other machines"
            ) from None
        return kept

    def write(self, kept: Kept) -> None:
        """Keep it."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):  # a full disk: it was said where it could not be opened
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, msgspec.json.encode(kept), 0)
