"""Entry point of `python tools/train_demo`."""

import os
import sys
from pathlib import Path

# Spinning OpenMP threads halve the speed of a shared machine; torch reads these on import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

if __name__ == "__main__":
    # Python put this folder first on the path; the package is to be found under its full name.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tools.train_demo.cli import main

    sys.exit(main())
