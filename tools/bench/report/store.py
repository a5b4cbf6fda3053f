"""Results on disk, one JSON line each, there as soon as they are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tools.bench.selection import make_folder


class Store:
    """A file of lines ``{"key": ..., "value": ...}``. What is under a key never changes, so a run
    that was killed goes on where it ended; a line it was killed in is dropped."""

    def __init__(self, path: Path) -> None:
        make_folder(path.parent)
        self._values: dict[str, Any] = {}
        whole = 0
        if path.exists():
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            for line in data[:whole].splitlines():
                entry = msgspec.json.decode(line)
                self._values[entry["key"]] = entry["value"]
        self._file = path.open("ab")
        self._file.truncate(whole)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def add(self, key: str, value: Any, **about: Any) -> None:
        """Keep a value; ``about``: for people who read the file."""
        self._values[key] = value
        entry = {"key": key, "value": value, **about}
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """No more values."""
        self._file.close()
