"""The log of a process whose disk refuses now and then."""

from pathlib import Path

from psworker.launch.log_file import LogFile


def test_a_refusal_is_told_once_and_what_comes_later_is_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "w0.log"
    log = LogFile(path, said.append)
    log.write(b"one\n")
    path.rename(tmp_path / "away")
    path.mkdir()
    log.write(b"two\n")
    log.write(b"three\n")
    assert said == [
        f"{path} cannot be written: Is a directory; the process continues without its log"
    ]

    path.rmdir()
    log.write(b"four\n")
    assert path.read_text() == "four\n"

    path.unlink()
    path.mkdir()
    log.write(b"five\n")
    assert len(said) == 2
