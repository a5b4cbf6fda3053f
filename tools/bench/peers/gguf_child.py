"""A process that converts a checkpoint to GGUF by llama.cpp's own converter.

Arguments: folder of llama.cpp's sources, directory of the model, file to write, type of the weights
as llama.cpp names it. It is run as a file, not imported.

The converter knows pre-tokenizers by what they make of one text, with one vocabulary each. The
bundled models have one that it knows (every digit alone, then GPT-2's words) with a vocabulary that
it does not, so it is told.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

DIGITS_THEN_WORDS = [("Digits", "individual_digits"), ("ByteLevel", "use_regex")]
"""What llama.cpp calls "smollm", after the models whose pre-tokenizer it was first."""


def main() -> None:
    """Convert."""
    sources, model, output, kind = sys.argv[1:]
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    if _digits_then_words(Path(model)):
        base: Any = importlib.import_module("conversion.base")
        base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
    sys.argv = [converter.__file__, model, "--outfile", output, "--outtype", kind]
    converter.main()


def _digits_then_words(model: Path) -> bool:
    file = model / "tokenizer.json"
    if not file.is_file():
        return False
    first: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")).get("pre_tokenizer") or {}
    parts: list[dict[str, Any]] = first.get("pretokenizers", [])
    return len(parts) == len(DIGITS_THEN_WORDS) and all(
        part["type"] == kind and part.get(how) is True
        for part, (kind, how) in zip(parts, DIGITS_THEN_WORDS, strict=True)
    )


if __name__ == "__main__":
    main()
