"""`python -m treadle.tracing.viewer RUN_DIR...`: the page without the trainer."""

import sys

from treadle.tracing.viewer.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
