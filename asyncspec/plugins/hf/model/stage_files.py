"""Which bytes of a checkpoint's files a stage reads."""

from __future__ import annotations

from asyncspec.backend.base import FilePart, sampled_parts, whole_file
from asyncspec.plugins.hf.checkpoint.checkpoint import LAYERS, open_checkpoint
from asyncspec.plugins.hf.checkpoint.files.headers import EMBEDDING, HEAD, INDEX, read_entries
from asyncspec.plugins.hf.checkpoint.model_config import GENERATION_CONFIG
from asyncspec.plugins.hf.model.weights import NORM_PREFIX, layer_of

TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*"),
)


def stage_files(name: str, span: tuple[int, int]) -> list[FilePart]:
    """What a stage with layers [first, end) reads of a checkpoint. Raises ``CheckpointError``."""
    checkpoint = open_checkpoint(name, tokenizer=False)
    folder = checkpoint.path
    small = (folder / file for file in ("config.json", GENERATION_CONFIG, INDEX))
    files = {file for file in small if file.is_file()}
    if span[1] == checkpoint.info.layers:
        # The last stage draws within grammars, over the tokenizer's vocabulary.
        files |= {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}
    parts = [whole_file(file) for file in sorted(files)]
    weights = sorted({info.file for info in checkpoint.stored.values()})
    parts += [FilePart(file, 0, read_entries(file)[0]) for file in weights]
    own = {f"{LAYERS}{layer}." for layer in range(*span)}
    ends = {EMBEDDING} if span[0] == 0 else set()
    if span[1] == checkpoint.info.layers:
        # A tied head is the embedding, and one that may be is compared with it.
        ends |= {HEAD, EMBEDDING}
    for tensor, info in checkpoint.stored.items():
        # Also those of a quantised head, which have other names.
        at_ends = any(tensor.startswith(end.removesuffix("weight")) for end in ends)
        norm = span[1] == checkpoint.info.layers and tensor.startswith(NORM_PREFIX)
        if layer_of(tensor) in own or at_ends or norm:
            parts.append(FilePart(info.file, info.offset, info.size))
        else:
            parts.extend(sampled_parts(info.file, info.offset, info.size))
    return parts
