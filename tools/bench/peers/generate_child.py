"""A process with a whole model: Hugging Face ``generate``, one line of JSON a question.

Arguments: directory of the target, of the draft model, number of threads, torch's name of a device.
On the CPU it computes in float32, elsewhere in the type of the weights. A question is ``{prompt,
tokens, way}``, an answer ``{seconds, token_ids, text}``. It is run as a file, not imported.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from asyncspec.backend.threads import set_thread_defaults

LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens``, as transformers' documentation uses it."""


def main() -> None:
    """Serve until standard input ends."""
    target, draft, threads, device = sys.argv[1:]
    set_thread_defaults()  # before torch is imported; more threads are asked of torch itself
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(int(threads))
    model, assistant = (
        AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32 if device == "cpu" else "auto"
        )
        .eval()
        .to(device)
        for path in (target, draft)
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "assistant": {"assistant_model": assistant},
        "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
    }
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        ids = tokenizer(asked["prompt"], return_tensors="pt").input_ids.to(device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                max_new_tokens=asked["tokens"],
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                **ways[asked["way"]],
            )
        new = out[0, ids.shape[1] :].tolist()
        text = tokenizer.decode(new, skip_special_tokens=True)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "token_ids": new, "text": text}), flush=True)


if __name__ == "__main__":
    main()
