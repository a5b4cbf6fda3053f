"""The tables of a cluster file, one sentence a key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct, to_builtins

from asyncspec.backend.base import DEFAULT_OPTIONS, EAGLE, DType, EngineOptions, Mode, Quantize
from asyncspec.backend.registry import LLAMA, backend_name, with_backend
from asyncspec.core.errors import UserError
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cluster import toml_file
from asyncspec_nodes.cluster.chat_templates import PLAIN
from asyncspec_nodes.console.hosts import is_host, is_loopback
from asyncspec_protocol.ids import is_draft
from asyncspec_protocol.links import role_of
from asyncspec_protocol.messages import Role

GenerationConfig = Literal["auto", "none"]
Wire = Literal["auto", "plain", "packed"]
BackendName = Literal["auto", "hf", "llama"]
DTYPES: tuple[str, ...] = get_args(DType)
MODES: tuple[str, ...] = get_args(Mode)
GENERATION_CONFIGS: tuple[str, ...] = get_args(GenerationConfig)
QUANTIZE: tuple[str, ...] = get_args(Quantize)
BACKENDS: tuple[str, ...] = get_args(BackendName)
MAX_STAGES = 64

Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class ClusterTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[cluster]``"""

    # Keeps two clusters on one network apart: nodes of another name are refused.
    name: Annotated[str, Meta(min_length=1, max_length=64)] = "asyncspec"
    # Number of verify stages; where given it must agree with the [[node]] tables.
    stages: Positive | None = None
    # Allows addresses beyond loopback without [security]: anyone who reaches a port is trusted.
    insecure: bool = False
    # How bfloat16 hidden states travel: "packed" takes seven tenths of the bytes and some
    # processor time, "plain" neither; "auto" packs on lines that are measured to be so slow that
    # it pays.
    wire: Wire = "auto"


class TargetTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[target]``"""

    # Directory of the checkpoint (relative to this file), or a Hugging Face id; ID@REVISION names a
    # branch, tag or commit of it. A directory on all nodes, or the id on all. Or a GGUF file
    # (docs/guide/own-models.md).
    path: Annotated[str, Meta(min_length=1)]
    # Type of weights and hidden states; "auto" is the checkpoint's own.
    dtype: DType = "auto"
    # "exact" gives bitwise the sequential decoder's tokens; "fast" may use any kernel.
    mode: Mode = "exact"
    # How stages keep their weights: as dtype says, or rounded to "int8" or "int4" while they are
    # read, which takes half or a quarter of bfloat16's memory (docs/guide/own-models.md).
    quantize: Quantize = "none"
    # How conversations become prompts: a Jinja file (relative to this file) in place of the chat
    # template of the target's tokenizer, or "plain" (docs/reference/http.md).
    chat_template: str | None = None
    # What requests get that leave sampling settings out: "auto", what the checkpoint's
    # generation_config.json recommends; "none", the API's own defaults (docs/reference/http.md).
    generation_config: GenerationConfig = "auto"
    # "hf" reads safetensors, "llama" GGUF files; "auto": what path names.
    backend: BackendName = "auto"


class DraftTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[draft]``"""

    # What proposes tokens: a draft model's directory or Hugging Face id, an EAGLE head's with
    # "eagle:" before it, "ngram", several of these joined by "+", or "none"
    # (docs/reference/sources.md).
    source: Annotated[str, Meta(min_length=1)] = "ngram"
    # The strategy for requests that name none.
    policy: str = "flowspec"


class NodeTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[[node]]``"""

    # 0 is the draft node (left out: those that come are not listed, docs/reference/dip-sd.md), 1..N
    # are the verify stages in pipeline order.
    rank: Annotated[int, Meta(ge=0, le=MAX_STAGES)]
    # Address this node listens on and the others reach it at.
    host: Annotated[str, Meta(min_length=1)]
    # TCP port there.
    port: Port
    # Half-open range of target layers, verify stages only; left out everywhere: an even split.
    layers: tuple[int, int] | None = None


class SourceTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[source]``: a node of its own for what [draft] source names, with the rank after the last
    stage's. Left out: every draft node has one."""

    # Address this node listens on and the draft nodes reach it at.
    host: Annotated[str, Meta(min_length=1)]
    port: Port


class LimitsTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[limits]``"""

    # Requests processed at a time, where caches have room for them; the others wait their turn.
    sessions: Positive = 16
    # Memory for the caches of a stage; 0: half of what is free once its weights are loaded, shared
    # with the other stages of its machine.
    cache_mib: Annotated[int, Meta(ge=0)] = 0
    # Memory for what a token source holds of its sessions (caches of a draft model or an EAGLE
    # head, and features); 0: half of what is free once it is loaded, shared with the stages of its
    # machine.
    draft_mib: Annotated[int, Meta(ge=0)] = 0
    # Requests that may wait; a further one is refused.
    waiting: Positive = 1024
    # Passes whose segments may wait at a stage besides the one in service.
    window: Positive = 2
    # Rows of a pass that several sessions share.
    batch_rows: Positive = 256
    # How long requests wait for a pipeline that is down before they fail, in seconds.
    rejoin_seconds: Seconds = 30.0
    # A silent peer is taken for dead after this many seconds.
    silence_seconds: Seconds = 10.0
    # A node whose device is at one job (a pass, a draft) for longer than this many seconds, and for
    # longer than 50 times what such jobs have taken, is given up: its process ends with an error,
    # for its supervisor to start it again. The first jobs of a type may take ten times as long.
    device_seconds: Seconds = 60.0

    @property
    def requests(self) -> int:
        """The most at a time: those that are processed, and those that wait."""
        return self.sessions + self.waiting


class PaceTable(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``[pace.RANK]``: makes a node as slow as another device, for experiments: the real work is
    done, and what is left of the time is waited for (docs/reference/testbed.md)."""

    # A verify stage: seconds a pass of up to ``plateau`` rows takes.
    seconds: NotNegative = 0.0
    # Rows that cost no more than one.
    plateau: Positive = 16
    # Seconds for each row past the plateau.
    row_seconds: NotNegative = 0.0
    # What drafts: seconds for each level of a tree.
    level_seconds: NotNegative = 0.0
    # What drafts: seconds for each call besides.
    call_seconds: NotNegative = 0.0


PASSES: tuple[str, ...] = ("seconds", "plateau", "row_seconds")
"""What a pace says of a verify stage."""

DRAFTING: tuple[str, ...] = ("level_seconds", "call_seconds")
"""What it says of a node that drafts."""


class TraceTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[trace]``"""

    # Events every node keeps in memory for asyncspec record; 0: none until somebody asks, and
    # then only what happens from there on. 100,000 are some 50 MB.
    events: Annotated[int, Meta(ge=0)] = 0
    # Whether traces hold the text of answers (they always hold token ids).
    text: bool = False


class SecurityTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[security]``: mutual TLS 1.3. Paths are relative to this file, so each machine keeps its
    own certificate and key under the same names."""

    # Certificate of the cluster's own authority: who it signed is a member.
    ca: str
    # This node's certificate (PEM).
    certificate: str
    # Its private key (PEM).
    key: str


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    target: TargetTable
    node: tuple[NodeTable, ...]
    cluster: ClusterTable = ClusterTable()
    draft: DraftTable = DraftTable()
    limits: LimitsTable = LimitsTable()
    trace: TraceTable = TraceTable()
    security: SecurityTable | None = None
    source: SourceTable | None = None
    llama: EngineOptions = DEFAULT_OPTIONS
    # By rank; of draft node d > 0 that is 1000 + d.
    pace: dict[int, PaceTable] = {}

    @property
    def stages(self) -> int:
        """Number of verify stages."""
        return sum(node.rank > 0 for node in self.node)

    @property
    def nodes(self) -> tuple[NodeTable, ...]:
        """All of them: the [[node]] tables, and behind them the token source's own."""
        if self.source is None:
            return self.node
        return (*self.node, NodeTable(self.stages + 1, self.source.host, self.source.port))

    def at(self, rank: int) -> NodeTable:
        """The node of a rank there is."""
        return next(node for node in self.nodes if node.rank == rank)

    def find(self, rank: int) -> NodeTable | None:
        """The node of a rank; None where the file has none: draft nodes need no table."""
        return next((node for node in self.nodes if node.rank == rank), None)


# --- The names of token sources: ``DIR``, ``eagle:DIR``, ``ngram``, ``none``, and mixes with
# ``+``.

NGRAM = "ngram"
NONE = "none"
WITHOUT_MODEL = (NGRAM, NONE)

HYBRID = "hybrid"
"""The default draft model and n-gram lookup, in one tree."""

_PLUS = "+"


def parts(name: str) -> tuple[str, ...]:
    """The names of the sources a mix is made of. Raises ``UserError`` for a mix that cannot be."""
    found = tuple(name.split(_PLUS))
    if len(found) == 1:
        return found
    wrong = next((part for part in found if not part or part in (NONE, HYBRID)), None)
    if wrong is not None:
        raise UserError(f"{name!r} mixes {wrong or 'nothing'!r} with something; leave it out")
    if len(set(found)) < len(found):
        raise UserError(f"{name!r} names a token source twice; leave one out")
    if sum(part.startswith(EAGLE) for part in found) > 1:
        raise UserError(f"{name!r} mixes two EAGLE heads; only one can read the target's features")
    return found


def each(name: str, change: Callable[[str], str]) -> str:
    """The name with each of its parts changed. Raises as ``parts``."""
    return _PLUS.join(change(part) for part in parts(name))


# --- The rules between the keys of a cluster file: ranks, addresses, layers, the policy's name.


def check(config: Config) -> None:
    """The rules between the keys. Raises ``UserError``."""
    _check_ranks(config)
    _check_addresses(config)
    _check_layers(config)
    _check_pace(config)
    target = with_backend(config.target.path, config.target.backend)
    check_options(target, config.llama, "[llama]")
    if problem := POLICIES.problem(config.draft.policy):
        raise UserError(f"[draft] policy: {problem}")
    for part in parts(config.draft.source):
        if part.startswith(EAGLE) and config.source is not None:
            raise UserError("[source]: an EAGLE head works on the draft node; leave the table out")
        if part == EAGLE:
            raise UserError(f'[draft] source: "{EAGLE}" names no head; add its directory')
        if part == HYBRID:
            raise UserError(f'[draft] source: "{HYBRID}" names no model; use "DIR+ngram"')


def check_options(target: str, options: EngineOptions, whose: str) -> None:
    """``whose`` as the user writes it. Raises ``UserError``."""
    if options != DEFAULT_OPTIONS and backend_name(target) != LLAMA:
        raise UserError(f"{whose} is for GGUF targets, and {target} is none; leave it out")
    if options.kv_type == "q8_0" and options.flash_attention == "off":
        raise UserError(f"{whose}: kv_type q8_0 needs flash attention; leave one of them out")


def _check_ranks(config: Config) -> None:
    ranks = sorted(node.rank for node in config.node)
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise UserError(f"two [[node]] tables have rank {rank}; give each rank to one node")
    # Draft nodes need no table: they come as they like.
    missing = [rank for rank in range(1, max([*ranks, 1]) + 1) if rank not in ranks]
    if missing:
        raise UserError(f"no [[node]] table has rank {missing[0]} (a verify stage); add it")
    stages = config.cluster.stages
    if stages is not None and stages != config.stages:
        raise UserError(
            f"[cluster] stages = {stages}, but {config.stages} [[node]] tables are verify stages; "
            "change one of them"
        )


def _check_addresses(config: Config) -> None:
    seen: dict[tuple[str, int], int] = {}
    for node in config.nodes:
        if not is_host(node.host):
            raise UserError(f"{node.host!r} is not a host name or an address (rank {node.rank})")
        other = seen.setdefault((node.host, node.port), node.rank)
        if other != node.rank:
            raise UserError(
                f"ranks {other} and {node.rank} both have the address {node.host}:{node.port}"
            )
        check_reach(config, node.host, f"rank {node.rank}")


def check_reach(config: Config, host: str, whose: str) -> None:
    """Who listens beyond this machine needs keys, or a word that nobody does. Raises
    ``UserError``."""
    if not (config.security or config.cluster.insecure or is_loopback(host)):
        raise UserError(
            f"{host} ({whose}) is not a loopback address: add a [security] table "
            "(docs/guide/several-machines.md), or set insecure = true in [cluster] on a network "
            "you trust"
        )


def _check_layers(config: Config) -> None:
    verify = sorted((n for n in config.node if n.rank), key=lambda n: n.rank)
    draft = config.find(0)
    if draft is not None and draft.layers is not None:
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


def _check_pace(config: Config) -> None:
    for rank, pace in config.pace.items():
        if config.find(rank) is None and not is_draft(rank):
            raise UserError(f"[pace.{rank}]: there is no node with rank {rank}")
        check_pace(f"[pace.{rank}]", pace, role_of(rank, config.stages))


def check_pace(where: str, pace: PaceTable, role: Role) -> None:
    """A node has the times of what it does, and no others, which would be idle. ``where`` as the
    user writes it. Raises ``UserError``."""
    own, whose = PASSES, "of what drafts, and this is a verify stage"
    if role != "verify":
        own, whose = DRAFTING, "a verify stage's, and this drafts"
    for key in set_keys(pace):
        if key not in own:
            raise UserError(f"{where}: {key} is {whose}; remove it")


def set_keys(pace: PaceTable) -> list[str]:
    """The keys that say something else than their defaults."""
    return list(to_builtins(pace))  # which leaves defaults out


# --- A cluster as one TOML file, the same for every node: the words and the rules that need no
# model.
# Law of this file: what a user wrote wrong is a ``UserError``, one sentence that names the file
# and the key. Nothing here opens a checkpoint or a socket.


def load(path: Path) -> Config:
    """Read a cluster file, check it, and make its paths absolute."""
    config = toml_file.load(path, "the cluster file", parse)
    return _absolute(config, path.absolute().parent)


def parse(text: str) -> Config:
    """A cluster file's text, checked."""
    config = toml_file.decode(text, Config)
    check(config)
    return config


def _absolute(config: Config, base: Path) -> Config:
    """Paths that exist beside the file win; else a target or draft is a Hugging Face id."""
    replace = msgspec.structs.replace
    security = config.security
    if security is not None:
        keys = {name: str(base / getattr(security, name)) for name in security.__struct_fields__}
        security = replace(security, **keys)
    template = config.target.chat_template
    if template is not None and template != PLAIN:
        template = str(base / Path(template).expanduser())
    target = with_backend(_beside(base, config.target.path), config.target.backend)
    return replace(
        config,
        target=replace(config.target, path=target, chat_template=template),
        draft=replace(config.draft, source=each(config.draft.source, partial(_source, base))),
        security=security,
    )


def _source(base: Path, name: str) -> str:
    if name.startswith(EAGLE):
        return EAGLE + _beside(base, name.removeprefix(EAGLE))
    return name if name in WITHOUT_MODEL else _beside(base, name)


def _beside(base: Path, name: str) -> str:
    if name.startswith(prefix := f"{LLAMA}:"):
        return prefix + _beside(base, name.removeprefix(prefix))
    path = base / Path(name).expanduser()
    written_as_path = name.startswith((".", "/", "~"))
    return str(path) if written_as_path or path.exists() else name


def to_toml(config: Config) -> str:
    """The file that loads as ``config``."""
    tables = msgspec.to_builtins(config)
    nodes, paces = tables.pop("node"), tables.pop("pace")
    parts = [
        toml_file.table(f"[{name}]", table) for name, table in tables.items() if table is not None
    ]
    parts.extend(toml_file.table("[[node]]", node) for node in nodes)
    parts.extend(toml_file.table(f"[pace.{rank}]", pace) for rank, pace in paces.items())
    return "\n".join(parts)
