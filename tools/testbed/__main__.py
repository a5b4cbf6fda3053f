"""``python tools/testbed COMMAND``: several devices on one machine (tools/testbed/README.md)."""

from __future__ import annotations

import sys
from pathlib import Path

# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from asyncspec.backend.threads import set_thread_defaults  # noqa: E402
from tools.testbed.command import main  # noqa: E402

if __name__ == "__main__":
    # A bed's devices have addresses of their own, but share one machine's cores.
    set_thread_defaults()
    sys.exit(main())
