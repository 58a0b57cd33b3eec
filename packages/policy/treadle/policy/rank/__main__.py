"""`python -m treadle.policy.rank`: one rank of a policy; see `rank.py`."""

import sys

from treadle.policy.rank.rank import main

if __name__ == "__main__":
    sys.exit(main())
