"""``python tools/clients``: the programs that people use against ``serve`` (CONTRIBUTING.md)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python put this folder first on the path; the package is to be found under its full name.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tools.clients.command import main

    sys.exit(main())
