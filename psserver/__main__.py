"""python -m psserver: the same as ps-server."""

import sys

from psserver.cli import main

if __name__ == "__main__":
    sys.exit(main())
