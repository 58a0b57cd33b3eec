"""``python -m treadle.rollout_server``; see `main.py`."""

import sys

from treadle.rollout_server.main import main

if __name__ == "__main__":
    sys.exit(main())
