"""onnxruntime's product: any number of rows, any shape, and nothing is told to anyone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.plugins.hf.kernels.cpu import dense, ort
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import dense_linear
from asyncspec.plugins.hf.kernels.cpu.linear import PackedLinear
from asyncspec.plugins.hf.kernels.cpu.ort import MlasLinear
from asyncspec.plugins.hf.kernels.probing import noise

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.torch

MOST = 300
HERE = pytest.mark.skipif(not ort.prefers_mlas(), reason="not this CPU's product")


@HERE
@pytest.mark.parametrize("shape", [(24, 16), (70, 250), (1, 3), (513, 129), (256, 1024)])
def test_rows_are_blind_to_each_other(shape: tuple[int, int]) -> None:
    linear = MlasLinear(noise(*shape), noise(shape[0], seed=1))
    x = noise(MOST, shape[1], seed=2)
    whole = linear(x)
    for count in range(1, MOST):
        assert torch.equal(linear(x[:count]), whole[:count])
        assert torch.equal(linear(x[None, -count:])[0], whole[-count:])


@given(st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(1, 4), max_size=3))
def test_it_equals_the_matrix_product(height: int, width: int, leading: list[int]) -> None:
    weight, bias, x = noise(height, width), noise(height, seed=1), noise(*leading, width)
    want = torch.nn.functional.linear(x, weight, bias)
    made = MlasLinear(weight, bias)
    # The session has a copy of its own, whatever the shape: what it was made of may be freed.
    weight.fill_(torch.nan)
    torch.testing.assert_close(made(x), want)


def test_operands_may_have_any_strides() -> None:
    weight, x = noise(16, 24).T, noise(24, 5).T[:, :16]
    want = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(MlasLinear(weight, None)(x), want)


def test_nan_stays_nan() -> None:
    weight = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [2.0, 1.0]])
    got = MlasLinear(weight, None)(torch.ones(3, 2))
    assert got[0].isfinite().tolist() == [False, False, True]


def test_tied_embeddings_keep_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is an embedding too has to lie there as it is."""
    monkeypatch.setattr(dense, "prefers_mlas", lambda: True)
    weight = noise(24, 16)
    made = dense_linear(weight, None, KernelSettings(), torch.float32)
    assert (type(made), made.weight_bytes) == (MlasLinear, 24 * 16 * 4)
    shared = dense_linear(weight, None, KernelSettings(), torch.float32, shared=True)
    assert (type(shared), shared.weight_bytes) == (PackedLinear, 0)


@pytest.mark.parametrize(
    ("capability", "name", "here"),
    [
        ("AVX2", "AMD EPYC", True),
        ("AVX512", "Intel Xeon", True),
        ("AVX512", "AMD EPYC", False),
        ("AVX512", None, False),
        ("DEFAULT", "Intel Xeon", False),
    ],
)
def test_on_which_cpus(
    monkeypatch: pytest.MonkeyPatch, capability: str, name: str | None, here: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    known = {} if name is None else {"cpu_name": name}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert ort.is_available() is here


def test_without_onnxruntime_another_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert not ort.prefers_mlas.__wrapped__()


@pytest.mark.slow
def test_onnxruntime_sends_no_telemetry(tmp_path: Path) -> None:
    """No thread and no file, which telling its makers of its use would need."""
    reported = """
import os
from asyncspec.plugins.hf.kernels.cpu import ort
ort.import_onnxruntime()
assert len(os.listdir("/proc/self/task")) == 1
"""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("threads are counted in /proc")
    environment = {name: value for name, value in os.environ.items() if "ORT_" not in name}
    subprocess.run(
        [sys.executable, "-c", reported],
        check=True,
        timeout=240,
        env=environment
        | {
            "HOME": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )
    assert not [*tmp_path.iterdir()]
