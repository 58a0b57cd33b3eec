"""``python -m treadle.rollout_server.conformance``."""

import sys

from treadle.rollout_server.conformance.main import main

if __name__ == "__main__":
    sys.exit(main())
