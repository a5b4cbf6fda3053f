"""From arguments to an exit code."""

from __future__ import annotations

import sys

from .data import load_corpus
from .errors import UserError
from .options import parse


def main(argv: list[str] | None = None) -> int:
    """Run the tool; 0 done, 2 the user's mistake (one line on stderr), 130 interrupted."""
    try:
        options = parse(argv)
        corpus = load_corpus(options.corpus, options.recipe.code_files)
        # torch takes seconds to import: a mistyped path should not have to wait for it.
        from .dflash_run import run_dflash
        from .pipeline import run
        from .prepare import prepare

        prepare(options, corpus)
        if options.dflash:
            run_dflash(options, options.dflash)
        else:
            run(options)
    except UserError as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_demo: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0
