"""What the verifier's memory allows (the paper's Gamma_max constraint)."""

from __future__ import annotations

from asyncspec.core.errors import UserError
from asyncspec.dipsd.model import Deployment, Verifier


def capacity(verifier: Verifier) -> float:
    """Positions whose keys and values fit beside the weights, on the tightest stage."""
    shape = verifier.shape
    return min(
        (stage.memory_bytes - shape.weight_bytes(stage.layers)) / shape.cache_bytes(stage.layers)
        for stage in verifier.stages
    )


def check_memory(deployment: Deployment) -> None:
    """Raise ``UserError`` if no plan can fit."""
    room = capacity(deployment.verifier)
    prefixes = [user.prefix for user in deployment.users]
    if room < 0:
        raise UserError("the target's weights do not fit in the verifier's memory")
    if deployment.verifier.memory == "all":
        if sum(prefixes) > room:
            raise UserError(
                f"the users' caches hold {sum(prefixes)} positions; the verifier has room for "
                f"{int(room)}: fewer users, shorter prefixes, or more memory"
            )
    elif max(prefixes) > room:
        raise UserError(
            f"a prefix of {max(prefixes)} positions does not fit; the verifier has room for "
            f"{int(room)}"
        )
