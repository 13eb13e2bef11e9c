"""python -m psserver.preload: a ps-server that imports its modules in advance and gets its
arguments later.

It reads one line from stdin: the command line as a JSON list. If stdin ends before that, it
exits.
"""

import json
import os
import sys
from importlib import import_module

from pscommon.core.exit_codes import ExitCode
from pscommon.system.imports import quick_imports
from psserver import cli


def main() -> int:
    """Wait for the command line, run the server, and return its exit code."""
    with quick_imports():
        import_module("psserver.app")
    line = sys.stdin.buffer.readline()
    if not line:
        return ExitCode.DONE
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    os.close(null)
    return cli.main(json.loads(line))


if __name__ == "__main__":
    sys.exit(main())
