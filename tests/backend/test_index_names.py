"""An index of a checkpoint may name tensors that no layer reads and no file holds."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncspec.plugins.hf.checkpoint.files.headers import INDEX, list_tensors


@pytest.mark.parametrize("mark", [b"", BOM_UTF8])
def test_only_tensors_that_files_hold_count(mark: bytes, tmp_path: Path) -> None:
    file = "model-00001-of-00001.safetensors"
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, tmp_path / file)
    names = {"weight_map": {"a": file, "rotary_emb.inv_freq": file}}
    (tmp_path / INDEX).write_bytes(mark + json.dumps(names).encode())
    assert list_tensors(tmp_path).keys() == {"a"}
