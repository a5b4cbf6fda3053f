"""Which stage holds which layers of the target."""

from __future__ import annotations

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import Config

Span = tuple[int, int]


def even_split(layers: int, stages: int) -> tuple[Span, ...]:
    """Contiguous half-open ranges; the first stages take what is left over, because the last one
    also has the head."""
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
    expected = 0
    for node in verify:
        assert node.layers is not None
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
    """The range of each verify stage, rank 1 first. Raises ``UserError``."""
    check_stages(config.stages, layers)
    given = [config.at(rank).layers for rank in range(1, config.stages + 1)]
    spans = tuple(span for span in given if span is not None)
    if not spans:
        return even_split(layers, config.stages)
    if spans[-1][1] != layers:
        raise UserError(
            f"the [[node]] tables hold layers 0 to {spans[-1][1]} (end not included), "
            f"but the target has {layers}; make the last range end at {layers}"
        )
    return spans
