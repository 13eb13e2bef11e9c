"""A contender for tests: `python -m tests.support.fake_contender SECONDS [spin]`.

It understands "go", "burn" (CPU) and "fail". "go" only reports that it took SECONDS. With "spin"
it never rests.
"""

import sys
import threading
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


def spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    if sys.argv[2:] == ["spin"]:
        threading.Thread(target=spin, daemon=True).start()
    serve({"go": lambda: {"seconds": float(sys.argv[1])}, "burn": burn, "fail": fail})
