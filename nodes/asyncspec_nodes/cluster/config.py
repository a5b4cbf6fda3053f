"""The tables of a cluster file, one sentence a key, and which stage holds which layers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncspec.backend.base import (
    DEFAULT_OPTIONS,
    DType,
    EngineOptions,
    KVType,
    Mode,
    ModelInfo,
    Quantize,
    StageOptions,
)
from asyncspec.backend.registry import backend_name
from asyncspec.core.errors import UserError
from asyncspec.planning import DEFAULT_PLANNER
from asyncspec_nodes.console.log_table import LogTable

GenerationConfig = Literal["auto", "none"]
Wire = Literal["auto", "plain", "packed"]
BackendName = Literal["auto", "hf", "llama"]
MAX_STAGES = 64
DEFAULT_STAGES = 3
"""Stages of commands that start or plan a cluster without a file."""

Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
# The bounds lie far beyond any use; they keep sums from overflowing.
NotNegative = Annotated[float, Meta(ge=0, lt=1e9)]
Above = Annotated[float, Meta(gt=1e-9, lt=1e9)]

AUTO: Literal["auto"] = "auto"

STARTED = "local"
"""A cluster that a command starts on its machine is called so, with the number of its process."""


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
    # What nodes compute on: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1", "xpu",
    # "mps"; of GGUF targets also "metal", "vulkan", "rocm".
    device: Annotated[str, Meta(min_length=1)] = "auto"
    # Type of the cache's items: "auto", what dtype says, of GGUF targets "f16", which only these
    # have; "q8_0", 8 bits with a scale, rounds, and takes half the memory or less.
    kv_type: KVType = "auto"
    # How conversations become prompts: a Jinja file (relative to this file) in place of the chat
    # template of the target's tokenizer, or "plain" (docs/reference/http.md).
    chat_template: str | None = None
    # What requests get that leave sampling settings out: "auto", what the checkpoint's
    # generation_config.json recommends; "none", the API's own defaults (docs/reference/http.md).
    generation_config: GenerationConfig = "auto"
    # "hf" reads safetensors, "llama" GGUF files; "auto": what path names.
    backend: BackendName = "auto"

    def stage_options(self, engine: EngineOptions) -> StageOptions:
        """How a stage with ``engine`` computes."""
        return StageOptions(self.dtype, self.mode, self.quantize, engine)


class DraftTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[draft]``"""

    # What proposes tokens: "auto" (the best of what there is), a draft model's directory or Hugging
    # Face id, an EAGLE head's with "eagle:" before it, "mtp" (the target's own next-token layers),
    # "twin" (the target itself in four bits; "twin:int8", "twin:none"), "ngram", "suffix", several
    # of these joined by "+", or "none" (docs/reference/sources.md).
    source: Annotated[str, Meta(min_length=1)] = "auto"
    # The strategy for requests that name none.
    policy: str = "flow"
    # Why it is this source, where "auto" chose it; for the status.
    chosen: str = ""
    # Whether the head in ``source``, one that asyncspec train-head made, goes on learning from
    # answers while the node has no request (docs/reference/sources.md).
    learn: bool = False


class NodeTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[[node]]``"""

    # 0 is the draft node (left out: those that come are not listed, docs/plugins/dip-sd.md), 1..N
    # are the verify stages in pipeline order.
    rank: Annotated[int, Meta(ge=0, le=MAX_STAGES)]
    # Address the others reach this node at; it listens there, too, unless ``listen`` says where.
    host: Annotated[str, Meta(min_length=1)]
    # TCP port there.
    port: Port
    # Half-open range of target layers, verify stages only; left out everywhere: an even split;
    # "auto" everywhere: each node works out the same best split, by ``memory_gib`` and the three
    # keys after it.
    layers: tuple[int, int] | Literal["auto"] | None = None
    # A verify stage's own target, in place of [target] path. GGUF beside a checkpoint: guarantee
    # "tolerance", [target] dtype "float32".
    target: str | None = None
    # In place of [target] device.
    device: str | None = None
    # Port where this node serves HTTP (--http comes first): a stage /health, /ready and /metrics,
    # the draft node OpenAI's interface as well.
    http: Port | None = None
    # HOST:PORT that this node listens on, where NAT or a container stands before it.
    listen: str | None = None
    # Memory of the machine that the node may take, in GiB; left out: enough.
    memory_gib: Above | None = None
    # Weights that its passes read, in GB a second: the others' mean where left out.
    gb_per_second: Above | None = None
    # What its machine is called where nodes are shown; left out: the host's name.
    name: str = ""
    # Its connection, one way, in milliseconds; and in Mbit a second: no limit where left out.
    latency_ms: NotNegative | None = None
    mbit: NotNegative | None = None


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
    # Tokens of a request, prompt and answer together; 0: as many as the target was made for.
    context: Annotated[int, Meta(ge=0)] = 0
    # Requests that may wait; a further one is refused.
    waiting: Positive = 1024
    # Passes whose segments may wait at a stage besides the one in service.
    window: Positive = 2
    # Rows of a pass that several sessions share.
    batch_rows: Positive = 256
    # Who plans batches of sessions whose policy is `dip-sd` (`asyncspec plugins` lists planners).
    planner: str = DEFAULT_PLANNER
    # How long requests wait for a pipeline that is down before they fail, in seconds.
    rejoin_seconds: Seconds = 30.0
    # A silent peer is taken for dead after at most this many seconds.
    silence_seconds: Seconds = 10.0
    # The process of a node whose device is at one job (a pass, a draft) for longer than this many
    # seconds, and than 50 times what such jobs have taken, ends with an error, for its supervisor
    # to start it again. The first jobs of a type may take ten times as long.
    device_seconds: Seconds = 60.0

    def context_of(self, longest: int) -> int:
        """Tokens of a request of a target that was made for ``longest``."""
        return min(self.context or longest, longest)

    def reason_of(self, info: ModelInfo) -> str:
        """Why the target bounds requests so; empty where it is ``context`` that does."""
        bounds = self.context_of(info.context_length) == info.context_length
        return info.context_reason if bounds else ""

    @property
    def requests(self) -> int:
        """The most at a time: those that are processed, and those that wait."""
        return self.sessions + self.waiting


class CacheTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[cache]``"""

    # Disk that each stage may take for prompts and answers it has computed, which then outlive its
    # process: a chat goes on after a restart without being read again. A draft node whose source
    # reads the target's features takes as much for these. 0: none. What is stored is not encrypted,
    # so not together with API keys (SECURITY.md).
    disk_mib: Annotated[int, Meta(ge=0)] = 0
    # Where (relative to this file); "": asyncspec/prefixes in the user's cache folder.
    folder: str = ""


class PaceTable(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``[pace.RANK]``: makes a node as slow as another device, for experiments: the real work is
    done, and what is left of the time is waited for."""

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
"""Keys of a verify stage's pace."""

DRAFTING: tuple[str, ...] = ("level_seconds", "call_seconds")
"""Keys of a drafting node's pace."""


class TraceTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[trace]``"""

    # Events every node keeps in memory for asyncspec record; 0: none until asked for, and
    # then only what happens from there on. 100,000 are some 50 MB.
    events: Annotated[int, Meta(ge=0)] = 0
    # Whether traces that hold token ids (asyncspec record --tokens) hold the text of answers too.
    text: bool = False


class SecurityTable(Struct, frozen=True, forbid_unknown_fields=True):
    """``[security]``: mutual TLS 1.3. Paths are relative to this file, so each machine keeps its
    own certificate and key under the same names."""

    # Certificate of the cluster's own authority.
    ca: str
    # This node's certificate (PEM).
    certificate: str
    # Its private key (PEM).
    key: str
    # The authority's revocation list (PEM).
    crl: str = ""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    target: TargetTable
    node: tuple[NodeTable, ...]
    cluster: ClusterTable = ClusterTable()
    draft: DraftTable = DraftTable()
    limits: LimitsTable = LimitsTable()
    cache: CacheTable = CacheTable()
    trace: TraceTable = TraceTable()
    security: SecurityTable | None = None
    source: SourceTable | None = None
    llama: EngineOptions = DEFAULT_OPTIONS
    log: LogTable = LogTable()
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
        """The node of a listed rank."""
        return next(node for node in self.nodes if node.rank == rank)

    def machine(self, rank: int) -> str:
        """What a node's machine is called; empty: by the host's name."""
        node = self.find(rank)
        return "" if node is None else node.name

    def find(self, rank: int) -> NodeTable | None:
        """The node of a rank; None where it is not listed, as a draft node may be."""
        return next((node for node in self.nodes if node.rank == rank), None)

    def target_of(self, rank: int) -> str:
        """The target's file as a node names it."""
        return getattr(self.find(rank), "target", None) or self.target.path

    @property
    def engine(self) -> EngineOptions:
        """What nodes compute on, and how llama.cpp does, where no [[node]] table says."""
        options = self.llama
        if options.device == DEFAULT_OPTIONS.device:
            options = replace(options, device=self.target.device)
        if options.kv_type == DEFAULT_OPTIONS.kv_type:
            options = replace(options, kv_type=self.target.kv_type)
        return options

    def engine_of(self, rank: int) -> EngineOptions:
        """As ``engine``, of a node."""
        device = getattr(self.find(rank), "device", None)
        return replace(self.engine, device=device) if device else self.engine

    @property
    def stage_options(self) -> StageOptions:
        """How stages compute where no [[node]] table says."""
        return self.target.stage_options(self.engine)

    def stage_options_of(self, rank: int) -> StageOptions:
        """As ``stage_options``, of a node."""
        return self.target.stage_options(self.engine_of(rank))

    @property
    def mixed(self) -> bool:
        """Whether stages have files of the target that round differently."""
        return len({backend_name(self.target_of(node.rank)) for node in self.node}) > 1


Span = tuple[int, int]


def even_split(layers: int, stages: int) -> tuple[Span, ...]:
    """Half-open ranges; the first stages take what is left over: the last one has the head."""
    share, rest = divmod(layers, stages)
    ends = [share * (i + 1) + min(i + 1, rest) for i in range(stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def check_stages(stages: int, layers: int) -> None:
    """A stage needs a layer of its own."""
    if stages > layers:
        raise UserError(
            f"{stages} stages are more than the target's {layers} layers; use at most {layers}"
        )


def check_layers(config: Config) -> None:
    """The rules of the ``layers`` keys that need no model. Raises ``UserError``."""
    draft = config.find(0)
    if draft is not None and draft.layers is not None:
        raise UserError("the draft node (rank 0) holds no target layers; remove its layers key")
    verify = sorted((node for node in config.node if node.rank), key=lambda node: node.rank)
    bare = [node.rank for node in verify if node.layers is None]
    if len(bare) == len(verify):
        return
    if bare:
        raise UserError(f"rank {bare[0]} has no layers key, others do; give it to all or to none")
    automatic = [node.rank for node in verify if node.layers == AUTO]
    if len(automatic) == len(verify):
        return
    if automatic:
        raise UserError(f'rank {automatic[0]} has layers = "auto", others not; give it to all')
    expected = 0
    for node in verify:
        assert isinstance(node.layers, tuple)
        first, end = node.layers
        if first != expected:
            raise UserError(
                f"rank {node.rank} starts at layer {first}, but layer {expected} comes next; "
                "ranges must follow each other without gap or overlap"
            )
        if end <= first:
            raise UserError(f"rank {node.rank} holds no layer: [{first}, {end}] ends at its start")
        expected = end


def layout(config: Config, layers: int) -> tuple[Span, ...]:
    """The range of each verify stage, rank 1 first. Raises ``UserError``. Automatic ones have been
    replaced (``placement``)."""
    check_stages(config.stages, layers)
    ranges = [config.at(rank).layers for rank in range(1, config.stages + 1)]
    spans = tuple(span for span in ranges if isinstance(span, tuple))
    if not spans:
        return even_split(layers, config.stages)
    if spans[-1][1] != layers:
        raise UserError(
            f"the [[node]] tables hold layers 0 to {spans[-1][1]} (end not included), "
            f"but the target has {layers}; make the last range end at {layers}"
        )
    return spans
