"""``python tools/schedules``: whether every law of the machines holds whatever fails.

Runs random schedules of requests and faults on simulated clusters, as ``tests/sim`` does with
some fixed ones. Exit code 1 where one fails: it is printed, reduced to a small one that belongs
into ``tests/sim/schedules.jsonl``.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python put this folder first on the path; packages and tests are to be found by their names.
    root = Path(__file__).resolve().parents[2]
    sys.path[:1] = [str(root), str(root / "tests")]
    from tools.schedules.command import main

    sys.exit(main(__doc__))
