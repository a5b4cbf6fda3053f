"""Fixtures of the torch tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncspec.backend.threads import set_thread_defaults

set_thread_defaults()


@pytest.fixture(scope="session", autouse=True)
def other_maker() -> Iterator[None]:
    """``ASYNCSPEC_TEST_OTHER_MAKER``: Intel's processors are taken for others, and others for
    Intel's."""
    with pytest.MonkeyPatch.context() as patch:
        if "ASYNCSPEC_TEST_OTHER_MAKER" in os.environ:
            import torch

            from asyncspec.plugins.hf.kernels.cpu import capabilities, ort

            name = "AMD EPYC" if capabilities.is_intel() else "Intel Xeon"
            here = {**torch.cpu.get_capabilities(), "cpu_name": name}
            patch.setattr(torch.cpu, "get_capabilities", lambda: here)
            # The answers for this processor, that modules of tests may have asked for.
            ort.prefers_mlas.cache_clear()
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Torch computes in the calling thread alone, and transformers keeps quiet."""
    import torch

    from asyncspec.plugins.hf.kernels.process import quiet_transformers

    torch.set_num_threads(1)
    quiet_transformers()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny checkpoint, or gives the one made before with the same settings."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **changes: Any) -> Path:
        from backend.tiny import save_tiny

        key = f"{family} {sorted(changes.items())}"
        if key not in made:
            made[key] = save_tiny(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return make
