"""A contender for tests: `python -m tests.benchmarks.talker SECONDS`. Words: "go", "burn" (CPU), "fail".

"go" only says that it took so long.
"""

import sys
import time

from benchmarks.speaker import Measurements, serve

BURNT = 0.3
"""Seconds of CPU that "burn" uses."""


def burn() -> Measurements:
    began = time.process_time()
    while time.process_time() - began < BURNT:
        pass
    return {"seconds": BURNT, "count": 2}


def fail() -> Measurements:
    raise RuntimeError("this work cannot be done")


if __name__ == "__main__":
    serve({"go": lambda: {"seconds": float(sys.argv[1])}, "burn": burn, "fail": fail})
