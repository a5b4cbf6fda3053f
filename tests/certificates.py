"""Certificates and keys for tests, as ``asyncspec keys`` makes them."""

from __future__ import annotations

from pathlib import Path

from asyncspec_nodes.plugins.join import key_folder


def make_keys(folder: Path, *holders: str) -> None:
    """An authority where there is none, and a certificate and key for each NAME[=ROLE,...]."""
    key_folder.issue(folder, [key_folder.Holder.read(text) for text in holders])
