"""The cluster file: one TOML file, the same for every node.

Law of this module: a user's mistake is a ``UserError``, one sentence that names the file and the
key. Nothing here opens a checkpoint or a socket.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import to_builtins
from msgspec.structs import replace

from asyncspec.backend.base import DEFAULT_OPTIONS, EngineOptions, twin_quantize
from asyncspec.backend.registry import LLAMA, backend_name, with_backend
from asyncspec.core.errors import UserError
from asyncspec.core.paths import expanded
from asyncspec.planning import PLANNERS
from asyncspec.policy.registry import POLICIES
from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.cluster import toml_file
from asyncspec_nodes.cluster.checkpoints import (
    AUTO,
    HYBRID,
    PLAIN,
    check_learning,
    each,
    is_name,
    parts,
)
from asyncspec_nodes.cluster.config import DRAFTING, PASSES, Config, PaceTable, check_layers
from asyncspec_nodes.console.arguments import host_and_port
from asyncspec_nodes.console.hosts import is_host, is_loopback
from asyncspec_protocol.ids import is_draft
from asyncspec_protocol.links import role_of
from asyncspec_protocol.messages import Role


def load(path: Path) -> Config:
    """Read a cluster file, check it, and make its paths absolute."""
    config = toml_file.load(path, "the cluster file", parse)
    return _absolute(config, path.absolute().parent)


def parse(text: str) -> Config:
    """A cluster file's text, checked."""
    config = toml_file.decode(text, Config)
    check(config)
    return config


def to_toml(config: Config) -> str:
    """The file that loads as ``config``."""
    tables = to_builtins(config)
    nodes, paces = tables.pop("node"), tables.pop("pace")
    parts = [
        toml_file.table(f"[{name}]", table) for name, table in tables.items() if table is not None
    ]
    parts.extend(toml_file.table("[[node]]", node) for node in nodes)
    parts.extend(toml_file.table(f"[pace.{rank}]", pace) for rank, pace in paces.items())
    return "\n".join(parts)


def check(config: Config) -> None:
    """The rules between the keys. Raises ``UserError``."""
    for rule in RULES:
        rule(config)


def examine(path: Path) -> tuple[Config | None, list[str]]:
    """A cluster file with all of its faults, a line each; no ``Config`` where it has some."""
    configs: list[Config] = []
    faults: list[str] = []

    def read(text: str) -> None:
        config, wrong = toml_file.decode_all(text, Config)
        faults.extend(wrong)
        if config is None:
            return
        for rule in RULES:
            try:
                rule(config)
            except UserError as error:
                faults.append(str(error))
        configs.append(config)

    try:
        toml_file.load(path, "the cluster file", read)
    except UserError as error:
        faults.append(str(error).removeprefix(f"{path}: "))
    if faults:
        return None, faults
    try:
        return _absolute(configs[0], path.absolute().parent), []
    except UserError as error:
        return None, [str(error)]


def _check_paces(config: Config) -> None:
    for rank, pace in config.pace.items():
        if config.find(rank) is None and not is_draft(rank):
            raise UserError(f"[pace.{rank}]: there is no node with rank {rank}")
        check_pace(f"[pace.{rank}]", pace, role_of(rank, config.stages))


def _check_targets(config: Config) -> None:
    target = with_backend(config.target.path, config.target.backend)
    files = [target, *(node.target for node in config.node if node.target)]
    gguf = next((file for file in files if backend_name(file) == LLAMA), target)
    check_options(gguf, config.llama, "[llama]")
    check_kv_type(gguf, config.engine)
    for node in config.node:
        if node.target and not node.rank:
            raise UserError("[[node]] target is for verify stages; the draft node's is [target]")


def _check_draft(config: Config) -> None:
    if (planner := config.limits.planner) not in PLANNERS:
        raise UserError(f"[limits] planner: there is no {planner}; use {' or '.join(PLANNERS)}")
    if problem := POLICIES.problem(config.draft.policy):
        raise UserError(f"[draft] policy: {problem}")
    for part in parts(config.draft.source):
        twin_quantize(part)  # raises where there is none such
        if part == EAGLE_PREFIX:
            raise UserError(f'[draft] source: "{EAGLE_PREFIX}" names no head; add its directory')
        if part == HYBRID:
            raise UserError(f'[draft] source: "{HYBRID}" names no model; use "DIR+ngram"')
    if config.draft.learn and config.draft.source != AUTO:
        check_learning(config.draft.source)


def check_options(target: str, options: EngineOptions, whose: str) -> None:
    """``whose`` as the user writes it. Raises ``UserError``."""
    if options != DEFAULT_OPTIONS and backend_name(target) != LLAMA:
        raise UserError(f"{whose} is for GGUF targets, and {target} is none; leave it out")


def check_kv_type(target: str, options: EngineOptions) -> None:
    """Raises ``UserError``."""
    if options.kv_type == "q8_0" and options.flash_attention == "off":
        raise UserError("kv_type q8_0 needs flash attention; leave one of them out")
    if options.kv_type == "f16" and backend_name(target) != LLAMA:
        raise UserError(f"kv_type f16 is for GGUF targets, and {target} is none; use auto or q8_0")


def _check_ranks(config: Config) -> None:
    """Ranks are distinct and without a gap; rank 0 may be missing."""
    ranks = [node.rank for node in config.node]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise UserError(f"two [[node]] tables have rank {twice[0]}; give each rank to one node")
    missing = sorted({1, *range(1, max(ranks, default=0))} - set(ranks))
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
        # Machines behind tunnels have one host, and may have the same ports for the rest.
        first = seen.setdefault((node.host, node.port), node.rank)
        if first != node.rank:
            raise UserError(
                f"rank {first} and rank {node.rank} both have the address {node.host}:{node.port}; "
                "change one of them"
            )
        check_reach(config, node.host, f"rank {node.rank}")
        if node.listen is not None:
            host, _ = host_and_port(f"listen of rank {node.rank}:", node.listen)
            check_reach(config, host, f"listen of rank {node.rank}")


def check_reach(config: Config, host: str, whose: str) -> None:
    """A node that listens beyond this machine needs keys or ``insecure``. Raises ``UserError``."""
    if not (config.security or config.cluster.insecure or is_loopback(host)):
        raise UserError(
            f"{host} ({whose}) is not a loopback address: add a [security] table "
            "(docs/guide/several-machines.md), or set insecure = true in [cluster] on a network "
            "you trust"
        )


def check_pace(where: str, pace: PaceTable, role: Role) -> None:
    """A node has times of its own work only. ``where``: for the ``UserError`` that this raises."""
    keys, whose = PASSES, "of what drafts, and this is a verify stage"
    if role != "verify":
        keys, whose = DRAFTING, "a verify stage's, and this drafts"
    for key in to_builtins(pace):  # leaves defaults out
        if key not in keys:
            raise UserError(f"{where}: {key} is {whose}; remove it")


RULES: tuple[Callable[[Config], None], ...] = (
    _check_ranks,
    _check_addresses,
    check_layers,
    _check_paces,
    _check_targets,
    _check_draft,
)


def _absolute(config: Config, base: Path) -> Config:
    """Existing paths beside the file win; else a target or draft is a Hugging Face id."""
    security, template = config.security, config.target.chat_template
    if security is not None:
        named = {name: key for name, key in to_builtins(security).items() if key}
        keys = {name: str(expanded(key, base)) for name, key in named.items()}
        security = replace(security, **keys)
    if template is not None and template != PLAIN:
        template = str(expanded(template, base))
    target = with_backend(beside(base, config.target.path), config.target.backend)
    return replace(
        config,
        target=replace(config.target, path=target, chat_template=template),
        node=tuple(
            replace(node, target=beside(base, node.target)) if node.target else node
            for node in config.node
        ),
        draft=replace(config.draft, source=each(config.draft.source, partial(_source, base))),
        security=security,
        cache=replace(config.cache, folder=str(expanded(config.cache.folder, base)))
        if config.cache.folder
        else config.cache,
    )


def _source(base: Path, name: str) -> str:
    if name.startswith(EAGLE_PREFIX):
        return EAGLE_PREFIX + beside(base, name.removeprefix(EAGLE_PREFIX))
    return name if is_name(name) else beside(base, name)


def beside(base: Path, name: str) -> str:
    """A model's name whose path is in the directory ``base``: absolute where it exists or is
    written as one, else an id. Raises ``UserError``."""
    if name.startswith(prefix := f"{LLAMA}:"):
        return prefix + beside(base, name.removeprefix(prefix))
    path = expanded(name, base)
    written_as_path = name.startswith((".", "/", "~"))
    return str(path) if written_as_path or os.path.exists(path) else name
