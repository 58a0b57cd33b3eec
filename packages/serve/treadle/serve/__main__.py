"""`python -m treadle.serve MODEL`: see `main.py`."""

import sys

from treadle.serve.main import main

if __name__ == "__main__":
    sys.exit(main())
