"""Kinds of processors, as stages report them."""

from __future__ import annotations

import pytest

from asyncspec.backend.base import CPU
from asyncspec_nodes.node.processor import processor_here, processor_in, processor_of

XEON = "fma avx2 avx512f avx512_bf16 avx512_vnni amx_tile"


@pytest.mark.parametrize(
    ("maker", "flags", "limit", "kind"),
    [
        ("GenuineIntel", XEON, "", "Intel AVX-512 VNNI bfloat16 AMX"),
        ("GenuineIntel", XEON, "avx2", "Intel AVX2"),
        ("AuthenticAMD", "avx2 avx512f", "", "AMD AVX-512"),
        ("HygonGenuine", "avx2", "", "HygonGenuine AVX2"),
        ("AuthenticAMD", "sse2", "", "AMD SSE"),
    ],
)
def test_a_kind_names_what_products_differ_by(
    maker: str, flags: str, limit: str, kind: str
) -> None:
    text = f"processor\t: 0\nvendor_id\t: {maker}\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
    assert processor_in(text, limit) == kind


def test_others_are_named_by_the_system_or_their_maker() -> None:
    assert processor_in("processor\t: 0\nFeatures\t: asimd\n") == ""
    assert processor_of(CPU, str) == processor_here() != ""
    assert processor_of("cuda:1", lambda name: f"{name} (NVIDIA H200)") == "NVIDIA H200"
    assert processor_of("x", lambda name: "emulated" * 20) == ("emulated" * 20)[:64]
