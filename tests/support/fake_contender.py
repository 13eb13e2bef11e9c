"""A contender for tests: `python -m tests.support.fake_contender SECONDS [spin]`.

It accepts "go", "burn" (CPU) and "fail". "go" only reports SECONDS. With "spin" a thread runs all
the time.
"""

import sys
import threading
import time

from benchmarks.speaker import Measurements, serve

BURNT = 0.3
"""CPU seconds that "burn" uses."""


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
