"""`python -m rlcollect`: the command line."""

from rlcollect.cli import main

if __name__ == "__main__":
    main()
