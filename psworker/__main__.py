"""python -m psworker: the same as ps-worker."""

import sys

from psworker.cli import main

if __name__ == "__main__":
    sys.exit(main())
