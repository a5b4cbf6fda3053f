"""What was found, in a file, and its connections once more."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from asyncspec.core.errors import UserError
from tools.fuzz_wire.attack import Connection, send_or_find
from tools.fuzz_wire.bed import Bed

Role = Literal["draft", "verify", "source"]


class Saved(Struct, frozen=True):
    """An attack's role and seed, which its hostile stages draw from, and its last connections."""

    role: Role
    seed: int
    connections: list[Connection]

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_bytes(msgspec.json.encode(self))


def load(file: Path) -> Saved:
    """What ``Saved.write`` wrote. Raises ``UserError``."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Saved)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"--replay {file}: {error}") from None


class Replay:
    """Saved connections, begun in their order."""

    def __init__(self, bed: Bed, connections: Sequence[Connection]) -> None:
        self._bed = bed
        self._connections = connections
        self.begun = 0

    async def run(self, most: int) -> None:
        """Until so many were begun and the own ones have ended."""
        while self.begun < most:
            one, rng = self._connections[self.begun], random.Random(self.begun)
            self.begun += 1
            await send_or_find(self._bed, one.rank, one.frames, rng)
            self._bed.check()
