"""Bed files: reading one, the rules between its keys, and the ready-made ones.

Law of this file: what a user wrote wrong is a ``UserError``, one sentence that names the file and
the key.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import to_builtins

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster import toml_file
from asyncspec_nodes.cluster.config import DRAFTING, PaceTable
from asyncspec_nodes.cluster.file import check_pace
from asyncspec_protocol.messages import Role
from tools.testbed.tables import MAX_DEVICES, Description

READY_MADE = Path(__file__).parent / "beds"


def ready_made() -> dict[str, Path]:
    """The beds that come with the program, by name."""
    return {path.stem: path for path in sorted(READY_MADE.glob("*.toml"))}


def load(name: str) -> Description:
    """A bed file, or a ready-made bed by its name. Raises ``UserError``."""
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        known = ready_made()
        if name not in known:
            raise UserError(
                f"there is no bed {name!r}; give a .toml file or one of: {', '.join(known)}"
            )
        path = known[name]
    return toml_file.load(path, "the bed file", parse)


def parse(text: str) -> Description:
    """A bed file's text, checked. Raises ``UserError``."""
    description = toml_file.decode(text, Description)
    check(description)
    return description


def check(description: Description) -> None:
    """The rules between the keys. Raises ``UserError``."""
    count = len(description.device)
    if not 2 <= count <= MAX_DEVICES:
        raise UserError(f"{count} [[device]] tables; a bed has 2 to {MAX_DEVICES}")
    for number, device in enumerate(description.device):
        if device.mbit is not None and None not in (device.up_mbit, device.down_mbit):
            raise UserError(
                f"device[{number}]: mbit is idle beside up_mbit and down_mbit; remove it"
            )
        if device.pace is not None:
            check_pace(f"device[{number}].pace", device.pace, _role(number, device.pace, count))
    seen: set[tuple[int, int]] = set()
    for number, link in enumerate(description.link):
        first, second = link.between
        for end in link.between:
            if not 0 <= end < count:
                raise UserError(
                    f"link[{number}]: there is no device {end}; they are 0 to {count - 1}"
                )
        if first == second:
            raise UserError(
                f"link[{number}]: a link is between two devices, not {first} and itself"
            )
        for way in [(first, second)] if link.one_way else [(first, second), (second, first)]:
            if way in seen:
                raise UserError(f"link[{number}]: the way from {way[0]} to {way[1]} is given twice")
            seen.add(way)


def _role(number: int, pace: PaceTable, count: int) -> Role:
    """What a device does. The last of three or more may be the token source's, if that is apart:
    then its pace says so."""
    if number == 0:
        return "draft"
    last = number == count - 1 > 1
    return "source" if last and any(key in DRAFTING for key in to_builtins(pace)) else "verify"
