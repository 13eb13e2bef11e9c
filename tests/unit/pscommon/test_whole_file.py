"""Files that are there whole or not at all, and names that are no file and stay what they are."""

import os
import subprocess
import sys
from pathlib import Path

from pscommon.system.small_files import remove_file, replace_file

LIMIT = 60.0


def test_a_link_stays_one_and_what_it_leads_to_goes(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(file)

    replace_file(link, "7\n")
    assert (link.is_symlink(), file.read_text()) == (True, "7\n")

    remove_file(link)
    assert (link.is_symlink(), list((tmp_path / "there").iterdir())) == (True, [])


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_file(path, "7\n")
        remove_file(path)

        assert os.read(reader, 100) == b"7\n"
        assert path.is_fifo()
    finally:
        os.close(reader)


def test_stdout_that_is_a_file_keeps_what_was_and_what_comes(tmp_path: Path) -> None:
    """Also by a link of somebody's own, and by the number of what is open."""
    link, file = tmp_path / "link", tmp_path / "out"
    link.symlink_to("/dev/stdout")
    script = """if True:
        import sys
        from pathlib import Path
        from pscommon.system.small_files import remove_file, replace_file
        print("before", flush=True)
        for name in sys.argv[1:]:
            replace_file(Path(name), "written\\n")
            remove_file(Path(name))
        print("after", flush=True)"""
    with file.open("w") as out:
        command = [sys.executable, "-c", script, "/dev/stdout", "/dev/fd/1", str(link)]
        assert subprocess.run(command, stdout=out, timeout=LIMIT).returncode == 0

    assert file.read_text().split() == ["before", "written", "written", "written", "after"]
    assert link.is_symlink()
