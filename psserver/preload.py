"""python -m psserver.preload: a ps-server that loads all it needs ahead, and hears later which
one it is to be.

It waits for one line on stdin: the command line as a JSON list. Where stdin ends before that,
nobody needed it.
"""

import json
import os
import sys
from importlib import import_module

from pscommon.core.exit_codes import ExitCode
from pscommon.system.imports import quick_imports
from psserver import cli


def main() -> int:
    """Returns the server's exit code."""
    with quick_imports():
        import_module("psserver.app")
    line = sys.stdin.buffer.readline()
    if not line:
        return ExitCode.DONE
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    return cli.main(json.loads(line))


if __name__ == "__main__":
    sys.exit(main())
