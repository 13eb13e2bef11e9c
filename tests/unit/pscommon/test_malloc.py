"""tune_malloc, tested in a child process because the setting is global."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
from pscommon.system.process_limits import tune_malloc
def faults():
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
assert tune_malloc()
bytes(8 << 20)
before = faults()
for _ in range(50):
    bytes(8 << 20)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_large_buffers_are_reused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )

    # 50 buffers of 2048 pages each; without the setting every page faults again
    assert int(done.stdout) < 2048
