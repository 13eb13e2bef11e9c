"""The streams of ps-run: a slow reader blocks only the display, and no writable line is lost."""

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from psworker.run.output import MAX_QUEUED_BYTES, Output, outputs

LIMIT = 30.0
FULL = "x" * MAX_QUEUED_BYTES


class Pipe:
    """Output into a pipe that only `read` reads."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._reader = io.FileIO(reader)
        self._stream = io.TextIOWrapper(io.FileIO(writer, "w"), encoding="latin-1")
        self.output = Output(self._stream)

    def read(self, count: int) -> str:
        data = b""
        while len(data) < count:
            data += self._reader.read(count - len(data))
        return data.decode("latin-1")

    def close(self) -> None:
        self._reader.close()  # later writes get EPIPE
        self.output.finish()
        self._stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_text_is_written_in_order(pipe: Pipe) -> None:
    for number in range(1000):
        pipe.output.write(f"{number}\n")
    pipe.output.finish()

    expected = "".join(f"{number}\n" for number in range(1000))
    assert pipe.read(len(expected)) == expected


def test_characters_outside_the_encoding_are_escaped(pipe: Pipe) -> None:
    pipe.output.write("a → é\n")

    assert pipe.read(11) == "a \\u2192 é\n"


def test_write_does_not_wait_for_the_reader(pipe: Pipe) -> None:
    for _ in range(3):
        pipe.output.write(FULL)

    assert pipe.output.is_behind


def test_wait_for_space_blocks_until_the_reader_reads(pipe: Pipe) -> None:
    pipe.output.write(FULL + FULL)
    text = threading.Event()
    thread = threading.Thread(target=lambda: pipe.output.wait_for_space() and text.set())
    thread.start()
    assert not text.wait(0.1)

    pipe.read(len(FULL + FULL))

    assert text.wait(LIMIT)
    thread.join()


def test_after_stop_blocking_lines_are_dropped_and_counted(pipe: Pipe) -> None:
    pipe.output.write(FULL + FULL)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(pipe.output.wait_for_space()))
    thread.start()

    pipe.output.stop_blocking()

    thread.join()
    assert found == [False]
    pipe.output.finish(stall_seconds=0.01)
    pipe.read(len(FULL + FULL))
    text = "[run] 1 lines were dropped: the reader was too slow\n"
    assert pipe.read(len(text)) == text


def test_finish_waits_for_a_slow_reader_but_not_for_a_stalled_one(pipe: Pipe) -> None:
    pipe.output.write(FULL)

    pipe.output.finish(stall_seconds=0.01)

    assert pipe.output.is_behind
    thread = threading.Thread(target=pipe.read, args=(len(FULL),))
    thread.start()
    pipe.output.finish()
    assert not pipe.output.is_behind
    thread.join()


def test_a_closed_pipe_is_no_problem(pipe: Pipe) -> None:
    pipe.output.write(FULL + FULL)
    pipe.close()

    assert pipe.output.wait_for_space()
    pipe.output.write("more")
    pipe.output.finish()
    assert pipe.output.problem == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_as_a_problem_without_an_exception() -> None:
    with open("/dev/full", "w") as stream:
        output = Output(stream)
        output.write("text")
        output.finish()

        assert "No space left" in output.problem


def test_a_missing_stream_discards_everything() -> None:
    output = Output(None)

    output.write("text")

    assert output.wait_for_space()
    assert not output.isatty()
    output.finish()


def test_two_streams_into_one_file_keep_their_order(tmp_path: Path) -> None:
    with (
        open(tmp_path / "both", "a") as one,
        open(tmp_path / "both", "a") as two,
        outputs(one, two) as (out, err),
    ):
        for number in range(100):
            (out if number % 2 else err).write(f"{number}\n")

    assert (tmp_path / "both").read_text().split() == [str(number) for number in range(100)]


def test_separate_streams_wait_for_separate_readers(pipe: Pipe, tmp_path: Path) -> None:
    with open(tmp_path / "err", "w") as file:
        err = Output(file)
        pipe.output.write(FULL)
        err.write("text")
        err.finish()

    assert (tmp_path / "err").read_text() == "text"


def test_an_output_has_the_properties_of_its_stream(tmp_path: Path) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    with Terminal(open(tmp_path / "tty", "wb"), encoding="ascii") as stream:
        output = Output(stream)

        assert output.isatty()
        assert output.encoding == "ascii"
