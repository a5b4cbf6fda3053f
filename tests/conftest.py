"""Hypothesis profiles: "dev" by default, "ci" derandomised, "thorough" for ``make fuzz``,
"mutants" for ``tools/mutants``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", deadline=None, suppress_health_check=QUIET)
settings.register_profile(
    "ci", deadline=None, suppress_health_check=QUIET, derandomize=True, print_blob=True
)
settings.register_profile(
    "thorough", deadline=None, suppress_health_check=QUIET, max_examples=5000, print_blob=True
)
# A failing example is all that is asked for, not the smallest.
settings.register_profile(
    "mutants", settings.get_profile("ci"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))
