"""The bundled models, as the measurements name them."""

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import EAGLE

EAGLE_HEAD = f"{EAGLE}{BUNDLED_TARGET.parent / 'demo-eagle'}"
