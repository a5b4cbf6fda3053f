"""A deployment as a running cluster measures it, as a CONFIG for ``asyncspec plan``."""

from __future__ import annotations

from pathlib import Path

from asyncspec.dipsd.model import Deployment
from asyncspec.errors import UserError
from asyncspec_nodes.cluster.toml_file import table

HEAD = "# As measured on a running cluster: asyncspec plan dipsd THIS_FILE\n"


def save(path: Path, deployment: Deployment) -> None:
    """Write the file. Raises ``UserError`` where that cannot be done."""
    try:
        path.write_text(to_toml(deployment), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def to_toml(deployment: Deployment) -> str:
    """The text of a file that says the same; ``deployment``'s passes are lines by rows
    (``RowCount``)."""
    verifier = deployment.verifier
    parts = [HEAD, table("[verifier]", {"hop_ms": verifier.hop_ms})]
    for stage in verifier.stages:
        row = stage.ms_per_flop * stage.layers / verifier.shape.layers
        parts.append(table("[[stage]]", {"fixed_ms": stage.fixed_ms, "row_ms": row}))
    for user in deployment.users:
        told = {"name": user.name, "alpha": user.alpha}
        times = {"token_ms": user.token_ms, "link_ms": user.link_ms}
        parts.append(table("[[user]]", {**told, **times}))
    rows = deployment.batch_rows or None
    parts.append(table("[plan]", {"longest": deployment.longest, "batch_rows": rows}))
    return "\n".join(parts)
