"""``python -m treadle.tools.sandbox``; see `server.py`."""

import sys

from treadle.tools.sandbox.server import main

if __name__ == "__main__":
    sys.exit(main())
