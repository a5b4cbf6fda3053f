"""All mutants, by what they break."""

from __future__ import annotations

from tools.mutants.catalogue.acceptance import ACCEPTANCE
from tools.mutants.catalogue.cache import CACHE
from tools.mutants.catalogue.flow import FLOW
from tools.mutants.catalogue.kernels import KERNELS
from tools.mutants.catalogue.recovery import RECOVERY
from tools.mutants.catalogue.source import SOURCE
from tools.mutants.catalogue.versions import VERSIONS
from tools.mutants.catalogue.wire import WIRE
from tools.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *VERSIONS,
    *CACHE,
    *FLOW,
    *KERNELS,
    *ACCEPTANCE,
    *RECOVERY,
    *SOURCE,
    *WIRE,
)
