"""One thread per process: tests run several at once, and threads that wait for a core by spinning slow all of them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
