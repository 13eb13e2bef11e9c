"""Files are written completely or not at all; links, pipes and devices are not replaced."""

import os
import subprocess
import sys
from pathlib import Path

from pscommon.system.small_files import remove_file, replace_file

LIMIT = 60.0


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, file = tmp_path / "link", tmp_path / "there" / "file"
    link.symlink_to(file)

    replace_file(link, "7\n")
    assert (link.is_symlink(), file.read_text()) == (True, "7\n")

    remove_file(link)
    assert (link.is_symlink(), list((tmp_path / "there").iterdir())) == (True, [])


def test_a_file_has_its_mode_from_the_start(tmp_path: Path) -> None:
    """Also where a killed process of the same number has left a readable file."""
    file, left = tmp_path / "file", tmp_path / f".file.{os.getpid()}"
    left.write_text("left")
    left.chmod(0o666)
    reader = left.open()

    replace_file(file, "7\n", 0o600)

    assert (file.read_text(), file.stat().st_mode & 0o777) == ("7\n", 0o600)
    assert reader.read() == "left"
    reader.close()


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
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


def test_a_file_as_stdout_is_appended_to(tmp_path: Path) -> None:
    """Also through a link of the user, and by descriptor number."""
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
