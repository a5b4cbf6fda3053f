"""A deployment as a running cluster measures it, as a CONFIG for ``asyncspec plan``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from asyncspec.dipsd.model import Deployment
from asyncspec.errors import UserError

HEAD = "# As measured on a running cluster: asyncspec plan dipsd THIS_FILE"


def save(path: Path, deployment: Deployment) -> None:
    """Write the file. Raises ``UserError`` where that cannot be done."""
    try:
        path.write_text(to_toml(deployment), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def to_toml(deployment: Deployment) -> str:
    """The text of a file that says the same; ``deployment``'s passes are lines by rows
    (``RowCount``)."""
    return "\n".join(_lines(deployment)) + "\n"


def _lines(deployment: Deployment) -> Iterator[str]:
    verifier = deployment.verifier
    yield from (HEAD, "", "[verifier]", f"hop_ms = {verifier.hop_ms!r}")
    for stage in verifier.stages:
        row = stage.ms_per_flop * stage.layers / verifier.shape.layers
        yield from ("", "[[stage]]", f"fixed_ms = {stage.fixed_ms!r}", f"row_ms = {row!r}")
    for user in deployment.users:
        # A JSON string is a TOML one.
        yield from ("", "[[user]]", f"name = {json.dumps(user.name)}", f"alpha = {user.alpha!r}")
        yield from (f"token_ms = {user.token_ms!r}", f"link_ms = {user.link_ms!r}")
    yield from ("", "[plan]", f"longest = {deployment.longest}")
