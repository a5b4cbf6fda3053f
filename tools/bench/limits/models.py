"""The bundled models, as the measurements name them."""

from asyncspec.backend.base import EAGLE
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET

EAGLE_HEAD = f"{EAGLE}{BUNDLED_TARGET.parent / 'demo-eagle'}"
