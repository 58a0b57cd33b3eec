"""``python -m treadle.rollout_server.doctor``; see `command.py`."""

import sys

from treadle.rollout_server.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
