"""The file of a cluster that machines join, written anew as they come and go: the draft node and
clients on the first machine read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.file import to_toml


class ClusterFile:
    """``path``: where it is; ``config``: what is to be in it now; ``say`` receives a line where it
    cannot be written."""

    def __init__(
        self, path: Callable[[], Path], config: Callable[[], Config], say: Callable[[str], None]
    ) -> None:
        self._path = path
        self._config = config
        self._say = say
        self._is_stale = False
        # Why it could not be written, said once.
        self._unwritten = ""

    def changed(self) -> None:
        """It is to be written: by the next ``refresh``."""
        self._is_stale = True

    def refresh(self) -> None:
        """Write it where it is to be; where that fails, as on a full disk, the next one tries
        again."""
        if not self._is_stale:
            return
        try:
            self.write()
        except OSError as error:
            why = f"{self._path()} cannot be written ({error.strerror}): nodes do not learn changes"
            if why != self._unwritten:
                self._say(why)
            self._unwritten = why
        else:
            self._is_stale, self._unwritten = False, ""

    def write(self) -> None:
        """Write it, as a whole or not at all. Raises ``OSError``."""
        path = self._path()
        part = path.with_suffix(".part")
        part.write_text(to_toml(self._config()), encoding="utf-8")
        part.replace(path)
