"""``python -m treadle.agent_loop.rpc.router``; see `main.py`."""

import sys

if __name__ == "__main__":
    try:
        from treadle.agent_loop.rpc.router.main import main
    except ModuleNotFoundError as error:  # the extra is not installed
        sys.exit(f"python -m treadle.agent_loop.rpc.router: {error}")
    sys.exit(main())
