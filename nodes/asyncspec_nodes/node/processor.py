"""The kind of processor that computes: stages of one kind round alike, others may not
(docs/reference/exactness.md)."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

from asyncspec.backend.base import CPU
from asyncspec_protocol.links import MAX_PROCESSOR

MAKERS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}

WIDE = (
    ("avx512_vnni", "VNNI"),
    ("avx512_bf16", "bfloat16"),
    ("amx_tile", "AMX"),
)
"""Flags of Linux beside AVX-512, and what users call them: products differ by these."""


def processor_of(device: str, describe: Callable[[str], str]) -> str:
    """The kind of what computes: of this machine's processor, or by its maker's name that of an
    accelerator, which ``describe`` gives behind the device's number: "cuda:0 (NVIDIA H200)"."""
    if device == CPU:
        return processor_here()
    description = describe(device)
    return (description.partition(" (")[2].removesuffix(")") or description)[:MAX_PROCESSOR]


def processor_here() -> str:
    """The kind of this machine's processor, as torch may use it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        text = ""
    return processor_in(text, os.environ.get("ATEN_CPU_CAPABILITY", "")) or platform.machine()


def processor_in(text: str, limit: str = "") -> str:
    """The kind that Linux describes in ``/proc/cpuinfo``; ``limit``: ``avx2`` where torch is to use
    no more. Empty: not one of x86."""
    lines = (line.partition(":") for line in text.splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    flags = values.get("flags", "").split()
    if not flags:
        return ""
    maker = values.get("vendor_id", "x86")
    name = MAKERS.get(maker, maker)
    if "avx512f" in flags and limit in ("", "avx512"):
        names = [wide for flag, wide in WIDE if flag in flags]
        return " ".join([name, "AVX-512", *names])
    return f"{name} AVX2" if "avx2" in flags and limit != "default" else f"{name} SSE"
