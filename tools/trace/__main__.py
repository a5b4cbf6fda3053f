"""``python tools/trace FILE``: see ``asyncspec trace``."""

import sys

from asyncspec_nodes.cli.trace import main

sys.exit(main())
