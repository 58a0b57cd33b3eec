"""``python -m treadle.conformance``."""

import sys

from treadle.conformance.main import main

if __name__ == "__main__":
    sys.exit(main())
