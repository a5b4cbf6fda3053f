"""``python tools/trace FILE``: see ``asyncspec trace``."""

import sys

from asyncspec_nodes.cli.main import main

sys.exit(main(["trace", *sys.argv[1:]]))
