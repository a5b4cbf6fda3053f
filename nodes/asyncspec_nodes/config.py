"""A cluster as one TOML file, the same for every node: the words and the rules that need no model.

Law of this file: what a user wrote wrong is a ``UserError``, one sentence that names the file and
the key. Nothing here opens a checkpoint or a socket.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from asyncspec.errors import UserError
from asyncspec.policy import POLICIES

DType = Literal["auto", "fp32", "float32", "bf16", "bfloat16"]
Mode = Literal["exact", "fast"]
DTYPES: tuple[str, ...] = get_args(DType)
MODES: tuple[str, ...] = get_args(Mode)
MOST_STAGES = 64

Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class ClusterTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[cluster]``"""

    # Keeps two clusters on one network apart: nodes of another name are refused.
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    # Number of verify stages; where given it must agree with the [[node]] tables.
    stages: Positive | None = None
    # Allows addresses beyond loopback without [security]: anyone who reaches a port is trusted.
    insecure: bool = False


class TargetTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[target]``"""

    # Directory of the checkpoint (relative to this file), or a Hugging Face id.
    path: Annotated[str, Meta(min_length=1)]
    # Type of weights and hidden states; "auto" is the checkpoint's own.
    dtype: DType = "auto"
    # "exact" gives bitwise the sequential decoder's tokens; "fast" may use any kernel.
    mode: Mode = "exact"


class DraftTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[draft]``"""

    # What proposes tokens: a directory, a Hugging Face id, "ngram", or "none".
    source: Annotated[str, Meta(min_length=1)] = "ngram"
    # The strategy for requests that name none.
    policy: str = "flowspec"


class NodeTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[[node]]``"""

    # 0 is the draft node, 1..N are the verify stages in pipeline order.
    rank: Annotated[int, Meta(ge=0, le=MOST_STAGES)]
    # Address this node listens on and the others reach it at.
    host: Annotated[str, Meta(min_length=1)]
    port: Port
    # Half-open range of target layers, verify stages only; left out everywhere: an even split.
    layers: tuple[int, int] | None = None


class LimitsTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[limits]``"""

    # Requests processed at a time; the others wait their turn.
    sessions: Positive = 4
    # Requests that may wait; a further one is refused.
    waiting: Positive = 1024
    # Segments that may wait at a stage besides the one in service.
    window: Positive = 2
    # How long requests wait for a pipeline that is down before they fail, in seconds.
    rejoin_seconds: Seconds = 30.0
    # A silent peer is taken for dead after this many seconds.
    silence_seconds: Seconds = 10.0


class SecurityTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[security]``: mutual TLS 1.3. Paths are relative to this file, so each machine keeps its
    own certificate and key under the same names."""

    # Certificate of the cluster's own authority: who it signed is a member.
    ca: str
    # This node's certificate and its private key (PEM).
    certificate: str
    key: str


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    cluster: ClusterTable
    target: TargetTable
    node: tuple[NodeTable, ...]
    draft: DraftTable = DraftTable()
    limits: LimitsTable = LimitsTable()
    security: SecurityTable | None = None

    @property
    def stages(self) -> int:
        """Number of verify stages."""
        return len(self.node) - 1

    def at(self, rank: int) -> NodeTable:
        """The node of a rank."""
        return next(node for node in self.node if node.rank == rank)


def load(path: Path) -> Config:
    """Read a cluster file, check it, and make its paths absolute."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the cluster file {path}: {_reason(error)}") from None
    try:
        config = parse(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return _absolute(config, path.absolute().parent)


def parse(text: str) -> Config:
    """A cluster file's text, checked."""
    try:
        config = msgspec.convert(tomllib.loads(text), Config)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise UserError(_sentence(str(error))) from None
    check(config)
    return config


def check(config: Config) -> None:
    """The rules between the keys. Raises ``UserError``."""
    _check_ranks(config)
    _check_addresses(config)
    _check_layers(config)
    if config.draft.policy not in POLICIES:
        names = ", ".join(POLICIES)
        raise UserError(f"unknown policy {config.draft.policy!r} in [draft]; there are {names}")


def _check_ranks(config: Config) -> None:
    ranks = sorted(node.rank for node in config.node)
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise UserError(f"two [[node]] tables have rank {rank}; give each rank to one node")
    missing = [rank for rank in range(max([*ranks, 1]) + 1) if rank not in ranks]
    if missing:
        kind = "the draft node" if missing[0] == 0 else "a verify stage"
        raise UserError(f"no [[node]] table has rank {missing[0]} ({kind}); add it")
    stages = config.cluster.stages
    if stages is not None and stages != config.stages:
        raise UserError(
            f"[cluster] stages = {stages}, but {config.stages} [[node]] tables are verify stages; "
            "change one of them"
        )


def _check_addresses(config: Config) -> None:
    seen: dict[tuple[str, int], int] = {}
    for node in config.node:
        if not node.host.strip() or "/" in node.host:
            raise UserError(f"{node.host!r} is not a host name or an address (rank {node.rank})")
        other = seen.setdefault((node.host, node.port), node.rank)
        if other != node.rank:
            raise UserError(
                f"ranks {other} and {node.rank} both have the address {node.host}:{node.port}"
            )
        if not (config.security or config.cluster.insecure or is_loopback(node.host)):
            raise UserError(
                f"{node.host} (rank {node.rank}) is not a loopback address: add a [security] table "
                "(nodes/README.md), or set insecure = true in [cluster] on a network you trust"
            )


def _check_layers(config: Config) -> None:
    verify = sorted((n for n in config.node if n.rank), key=lambda n: n.rank)
    if config.at(0).layers is not None:
        raise UserError("the draft node (rank 0) holds no target layers; remove its layers key")
    given = [n for n in verify if n.layers is not None]
    if given and len(given) < len(verify):
        bare = next(n.rank for n in verify if n.layers is None)
        raise UserError(f"rank {bare} has no layers key, others do; give it to all or to none")
    expected = 0
    for node in given:
        first, end = node.layers or (0, 0)
        if first != expected:
            raise UserError(
                f"rank {node.rank} starts at layer {first}, but layer {expected} comes next; "
                "ranges must follow each other without gap or overlap"
            )
        if end <= first:
            raise UserError(f"rank {node.rank} holds no layer: [{first}, {end}] ends at its start")
        expected = end


def is_loopback(host: str) -> bool:
    """True for an address that no other machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _absolute(config: Config, base: Path) -> Config:
    """Paths that exist beside the file win; else a target or draft is a Hugging Face id."""
    replace = msgspec.structs.replace
    security = config.security
    if security is not None:
        keys = {name: str(base / getattr(security, name)) for name in security.__struct_fields__}
        security = replace(security, **keys)
    return replace(
        config,
        target=replace(config.target, path=_beside(base, config.target.path)),
        draft=replace(config.draft, source=_beside(base, config.draft.source)),
        security=security,
    )


def _beside(base: Path, name: str) -> str:
    path = base / Path(name).expanduser()
    written_as_path = name.startswith((".", "/", "~"))
    return str(path) if written_as_path or path.is_dir() else name


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def _sentence(text: str) -> str:
    """msgspec's message in the file's own words: "... - at `$.node[0].port`" -> "(node[0].port)"."""
    text = re.sub(r" - at `\$\.?([^`]*)`$", lambda m: f" (at {m[1]})" if m[1] else "", text)
    text = text.replace("Object contains unknown field", "unknown key")
    return text.replace("Object missing required field", "missing key").replace("`", "'")


def to_toml(config: Config) -> str:
    """The file that loads as ``config``."""
    tables = msgspec.to_builtins(config)
    nodes = tables.pop("node")
    parts = [_table(f"[{name}]", table) for name, table in tables.items() if table is not None]
    parts.extend(_table("[[node]]", node) for node in nodes)
    return "\n".join(parts)


def _table(head: str, table: dict[str, object]) -> str:
    # TOML's strings, numbers, booleans and arrays of numbers are written as JSON writes them.
    lines = (
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in table.items()
        if value is not None
    )
    return f"{head}\n{''.join(lines)}"
