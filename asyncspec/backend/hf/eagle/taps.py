"""Which of the target's hidden states an EAGLE head reads. No torch."""

from __future__ import annotations

from msgspec import Struct

from asyncspec.backend.hf.eagle.settings import Settings
from asyncspec_protocol.messages import FINAL

IDS = "eagle_aux_hidden_state_layer_ids"


class Features(Struct, frozen=True):
    """The feature of a position: what the target has to hand over for each committed token.

    EAGLE-1/2: the final hidden state *after* the final norm, that is what the target's ``lm_head``
    reads; ``depths`` is empty. EAGLE-3: the residual stream at some depths, side by side from low
    to high. Depth d is what comes out of the first d layers, not normed: what enters layer d,
    counted from 0, and transformers' ``hidden_states[d]`` for d below the number of layers.
    """

    depths: tuple[int, ...]
    # Columns of a feature row.
    width: int

    @property
    def wanted(self) -> tuple[int, ...]:
        """As ``Open.features`` says it."""
        return self.depths or (FINAL,)


def tap_depths(settings: Settings, layers: int) -> tuple[int, ...]:
    """The depths an EAGLE-3 head for a target of so many layers was trained on.

    Raises ``CheckpointError`` where they do not exist in this target.
    """
    nested = settings.values.get("eagle_config")
    ids = nested.get(IDS) if isinstance(nested, dict) else None
    ids = settings.values.get(IDS) if ids is None else ids
    if ids is None:
        depths = (2, layers // 2, layers - 3)
        if depths != tuple(sorted(set(depths))):
            raise settings.wrong(
                f"EAGLE-3 reads a target after layers 2, n/2 and n-3; {layers} layers are too few"
            )
        return depths
    whole = isinstance(ids, list) and all(type(i) is int for i in ids) and ids
    if not whole or ids != sorted(set(ids)):
        raise settings.wrong(f"{IDS} is {ids!r}, expected ascending layer numbers")
    # Two conventions are about, and no head says which it means: layers whose output is taken, or
    # layers whose input is. Nobody taps the embedding, so a list that starts with 1 is the former.
    shift = 1 if ids[0] == 1 else 0
    depths = tuple(i + shift for i in ids)
    if not 0 <= depths[0] <= depths[-1] <= layers:
        raise settings.wrong(f"{IDS} is {ids}, but the target has {layers} layers")
    return depths
