"""The log file of a process whose disk fails at times."""

from pathlib import Path

from psworker.supervision.processes import LogFile


def test_a_refused_write_is_reported_once_and_later_lines_are_written(tmp_path: Path) -> None:
    messages: list[str] = []
    path = tmp_path / "w0.log"
    log = LogFile(path, messages.append)
    log.write(b"one\n")
    path.rename(tmp_path / "away")
    path.mkdir()
    log.write(b"two\n")
    log.write(b"three\n")
    assert messages == [
        f"{path} cannot be written: Is a directory; the process continues without its log"
    ]

    path.rmdir()
    log.write(b"four\n")
    assert path.read_text() == "four\n"

    path.unlink()
    path.mkdir()
    log.write(b"five\n")
    assert len(messages) == 2
