"""All mutants, by what they break."""

from __future__ import annotations

from tools.mutants.catalogue.cache import CACHE
from tools.mutants.catalogue.recovery import RECOVERY
from tools.mutants.catalogue.versions import VERSIONS
from tools.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*VERSIONS, *CACHE, *RECOVERY)
