"""One of our workers: as `modules`, and each step takes a batch of the job's data. Args: SETUP
ADDRESS RANK.
"""

import sys

from benchmarks.contenders.modules import main
from benchmarks.setup import Setup

if __name__ == "__main__":
    main(Setup.from_json(sys.argv[1]), sys.argv[2], int(sys.argv[3]), with_data=True)
