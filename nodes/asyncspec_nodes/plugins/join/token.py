"""What a machine needs to join: where the cluster is, its certificate's digest, and a secret; and
the file that keeps them from one run of ``asyncspec up`` to the next, so that machines that have
joined find the cluster again."""

from __future__ import annotations

import base64
import binascii
import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.security import NODE, OPERATOR
from asyncspec_nodes.local.file_lock import lock
from asyncspec_nodes.plugins.join.authority import Authority, make_key, make_request

SECRET_BYTES = 16
_PREFIX = "as1-"


class Token(Struct, frozen=True, array_like=True):
    """``str``: as users pass it on. It admits any machine."""

    # Addresses of the machine that it was made on, the likeliest first.
    hosts: tuple[str, ...]
    port: int
    # SHA-256 of the certificate that is shown there.
    digest: bytes
    secret: bytes

    def __str__(self) -> str:
        raw = msgspec.msgpack.encode(self)
        check = binascii.crc32(raw).to_bytes(4, "big")
        return _PREFIX + base64.urlsafe_b64encode(raw + check).decode().rstrip("=")

    @property
    def bearer(self) -> str:
        """The secret, for a header."""
        return self.secret.hex()

    @property
    def cluster(self) -> str:
        """What the cluster is announced as."""
        return self.digest[:8].hex()


def read(text: str) -> Token:
    """Raises ``UserError`` for what is no token, or not the whole of one."""
    try:
        if not text.startswith(_PREFIX):
            raise ValueError
        body = text.removeprefix(_PREFIX)
        raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        token = msgspec.msgpack.decode(raw[:-4], type=Token)
        if binascii.crc32(raw[:-4]).to_bytes(4, "big") != raw[-4:]:
            raise ValueError
        if len(token.digest) != 32 or not 0 < token.port < 65536:
            raise ValueError
    except (ValueError, msgspec.MsgspecError):
        raise UserError(
            "that is no token, or not the whole of one; copy the line that asyncspec up prints"
        ) from None
    return token


class StoredKeys(Struct):
    """The cluster's keys, PEM: they make their reader any of its machines."""

    authority_key: str
    authority: str
    # Key and certificate of the machine that the cluster is started on.
    key: str
    certificate: str
    # Secret of the token.
    secret: bytes
    # Where machines join; 0: none yet.
    port: int = 0
    # Machines that the last run had, which a next one waits for; 0: none yet.
    machines: int = 0


def new_cluster(name: str) -> StoredKeys:
    """Keys of a cluster that has no machines. ``name``: of the one that it is started on."""
    authority, key = Authority.new(), make_key()
    certificate = authority.issue(make_request(key, name), NODE, OPERATOR)
    return StoredKeys(
        authority.key, authority.pem, key, certificate, secrets.token_bytes(SECRET_BYTES)
    )


class TokenFile:
    """``with``: locked, so that two clusters at a time never share it. Where it cannot be used
    ``say`` receives why, and nothing is kept. ``new``: earlier tokens are void."""

    def __init__(self, file: Path | None, say: Callable[[str], None], *, new: bool = False) -> None:
        self._file = file
        self._say = say
        self._new = new
        self._descriptor: int | None = None

    def __enter__(self) -> TokenFile:
        if self._file is None:
            return self
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            os.fchmod(self._descriptor, 0o600)  # it may have been there
            lock(self._descriptor)
        except BlockingIOError:
            self._close()
            self._say(
                f"another cluster runs with the token of {self._file}: this one's ends with it; "
                "--token-file FILE keeps both"
            )
        except OSError as error:
            self._close()
            self._say_unwritten(error)
        return self

    def _say_unwritten(self, error: OSError) -> None:
        self._say(
            f"{self._file} cannot be written ({error.strerror}): the token ends with this cluster; "
            "--token-file FILE keeps it elsewhere"
        )

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self) -> StoredKeys | None:
        """None where nothing is kept, or not to be used. Raises ``UserError``."""
        if self._descriptor is None or self._new:
            return None
        data = os.pread(self._descriptor, 1 << 20, 0)
        if not data:
            return None
        try:
            stored = msgspec.json.decode(data, type=StoredKeys)
            Authority(stored.authority_key, stored.authority)
        except (msgspec.MsgspecError, ValueError):
            raise UserError(
                f"{self._file} is damaged; remove it, or give --new-token, and run the join "
                "command that is printed then on the other machines"
            ) from None
        return stored

    def write(self, keys: StoredKeys) -> None:
        """Keep it, whole or not at all."""
        data = msgspec.json.encode(keys)
        if self._descriptor is None or os.pread(self._descriptor, 1 << 20, 0) == data:
            return
        try:
            os.ftruncate(self._descriptor, 0)
            if os.pwrite(self._descriptor, data, 0) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._descriptor, 0)
            self._say_unwritten(error)
