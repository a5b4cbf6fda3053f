"""The rules between the keys of a cluster file: ranks, addresses, layers, the policy's name."""

from __future__ import annotations

from msgspec import to_builtins

from asyncspec.errors import UserError
from asyncspec.policy import POLICIES
from asyncspec_nodes.cluster.config_tables import DRAFTING, PASSES, Config, PaceTable
from asyncspec_nodes.cluster.hosts import is_host, is_loopback
from asyncspec_nodes.cluster.source_names import EAGLE, HYBRID, parts
from asyncspec_protocol.handshake import role_of
from asyncspec_protocol.ids import is_draft
from asyncspec_protocol.messages import Role


def check(config: Config) -> None:
    """The rules between the keys. Raises ``UserError``."""
    _check_ranks(config)
    _check_addresses(config)
    _check_layers(config)
    _check_pace(config)
    if problem := POLICIES.problem(config.draft.policy):
        raise UserError(f"[draft] policy: {problem}")
    for part in parts(config.draft.source):
        if part.startswith(EAGLE) and config.source is not None:
            raise UserError("[source]: an EAGLE head works on the draft node; leave the table out")
        if part == EAGLE:
            raise UserError(f'[draft] source: "{EAGLE}" names no head; add its directory')
        if part == HYBRID:
            raise UserError(f'[draft] source: "{HYBRID}" names no model; use "DIR+ngram"')


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
            "(nodes/README.md), or set insecure = true in [cluster] on a network you trust"
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
