"""``asyncspec run --check`` in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time there was a little fox who"
_TOKENS = 64
_RUN_SECONDS = 900.0


def checked_run(
    target: Path, draft: Path | None, device: str, policy: str, stages: int
) -> dict[str, Any] | str:
    """The answer of ``asyncspec run --check --json``; or why there is none."""
    argv = ["run", "--target", str(target), "--device", device, "--stages", str(stages)]
    argv += ["--draft", "ngram" if draft is None else str(draft), "--policy", policy]
    argv += ["--prompt", PROMPT, "--max-new-tokens", str(_TOKENS), "--check", "--json"]
    command = [sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", *argv, "--no-chat"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_SECONDS)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"no answer within {_RUN_SECONDS:g} s"
    except ValueError:
        return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return answer
