"""python -m psworker: the same as ps-worker."""

import sys

from pscommon.entry import ps_worker

if __name__ == "__main__":
    sys.exit(ps_worker())
