"""``python -m treadle.agent_loop.rpc.router``; see `main.py`."""

import sys

from treadle.agent_loop.rpc.router.main import main

if __name__ == "__main__":
    sys.exit(main())
