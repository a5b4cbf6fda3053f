"""What a machine needs to join: where the cluster is, its certificate's digest, and a secret."""

from __future__ import annotations

import base64
import binascii

import msgspec
from msgspec import Struct

from asyncspec.core.errors import UserError

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
