"""Which bytes of a GGUF model's files a stage reads."""

from __future__ import annotations

from asyncspec.backend.base import FilePart, sampled_parts, whole_file
from asyncspec.backend.llama.cut import cut
from asyncspec.backend.llama.target import OpenTarget


def stage_files(target: OpenTarget, span: tuple[int, int]) -> list[FilePart]:
    """Of layers [first, end). Raises ``CheckpointError``."""
    _, own = cut(target.model, *span)
    kept = {(tensor.file, tensor.offset) for tensor in own.values() if tensor.file is not None}
    found: list[FilePart] = []
    for file in target.model.files:
        there = [tensor for tensor in target.model.tensors.values() if tensor.file == file]
        if not there:
            found.append(whole_file(file))
            continue
        found.append(FilePart(file, 0, min(tensor.offset for tensor in there)))
        for tensor in there:
            if (file, tensor.offset) in kept:
                found.append(FilePart(file, tensor.offset, tensor.size))
            else:
                found.extend(sampled_parts(file, tensor.offset, tensor.size))
    return found
