"""python -m psserver: the same as ps-server."""

import sys

from pscommon.entry import ps_server

if __name__ == "__main__":
    sys.exit(ps_server())
