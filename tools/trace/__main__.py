"""``python tools/trace FILE``: see ``asyncspec trace``."""

import sys

from asyncspec_nodes.trace_cli import main

sys.exit(main())
