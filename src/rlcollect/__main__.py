"""`python -m rlcollect`: the command line."""

import sys

from rlcollect.cli import main

if __name__ == "__main__":
    sys.exit(main())
