"""The bundled models, as the measurements name them."""

from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET

EAGLE_HEAD = f"{EAGLE_PREFIX}{BUNDLED_TARGET.parent / 'demo-eagle'}"
