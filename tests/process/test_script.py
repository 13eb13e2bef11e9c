"""A worker runs a script like plain Python does; each way to end has its exit code."""

import json
import os
import py_compile
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

LIMIT = 60.0

# Only the code that runs a script: no torch, no servers.
RUN = """
import sys
from psworker.supervision.script import Script, run
script = Script(sys.argv[2], sys.argv[1] == "module", tuple(sys.argv[4:]))
sys.exit(run(script, debug=sys.argv[3] == "debug"))
"""


def popen(
    target: str,
    *args: str,
    folder: Path,
    module: bool = False,
    debug: bool = False,
    **environment: str,
) -> subprocess.Popen[str]:
    how = ["module" if module else "file", target, "debug" if debug else ""]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, *how, *args],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    code: str, *args: str, folder: Path, debug: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(code)
    return finish(popen("train.py", *args, folder=folder, debug=debug, **environment))


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_a_script_is_main_with_its_arguments_and_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "neighbour.py").write_text("WORD = 'found'")
    (inner / "train.py").write_text(
        "import sys, neighbour; print(__name__, __file__, sys.argv, neighbour.WORD, sys.path[0])"
    )

    result = finish(popen("inner/train.py", "--ps", "--", "-m", folder=tmp_path))

    arguments = ["inner/train.py", "--ps", "--", "-m"]
    assert result.stdout.strip() == f"__main__ {inner}/train.py {arguments} found {inner}"
    assert result.returncode == 0


# Prints what a script can observe of its start. Workers are started with -P.
PROBE = """
import json, sys
own = {
    name: str(value) for name, value in globals().items()
    if name in ("__name__", "__file__", "__package__")
}
kinds = {
    name: type(value).__name__ for name, value in globals().items() if name != "__annotations__"
}
spec = __spec__ and (__spec__.name, __spec__.origin)
is_main = sys.modules["__main__"].__dict__ is globals()
print(json.dumps([own, kinds, spec, sys.argv, sys.path[0], is_main]))
"""


@pytest.mark.parametrize(
    "target", ["inner/train.py", "link.py", "inner", "app.zip", "bytes.pyc", "-m pack", "-m pack.a"]
)
def test_a_script_has_the_same_globals_as_under_plain_python(tmp_path: Path, target: str) -> None:
    for name in (
        "inner/train.py",
        "inner/__main__.py",
        "pack/__init__.py",
        "pack/__main__.py",
        "pack/a.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PROBE if "init" not in name else "")
    (tmp_path / "link.py").symlink_to("inner/train.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as app:
        app.write(tmp_path / "inner" / "__main__.py", "__main__.py")
    py_compile.compile(str(tmp_path / "inner" / "train.py"), str(tmp_path / "bytes.pyc"))
    plain = subprocess.run(
        [sys.executable, *target.split(), "--lr", "1"],
        cwd=tmp_path,
        capture_output=True,
        timeout=LIMIT,
        check=True,
    )

    module, name = target.startswith("-m"), target.split()[-1]
    result = finish(popen(name, "--lr", "1", folder=tmp_path, module=module))

    assert json.loads(result.stdout) == json.loads(plain.stdout)
    assert not list(tmp_path.glob("inner/__pycache__/train.*"))


def test_exit_handlers_can_use_the_script_module(tmp_path: Path) -> None:
    code = (
        "import atexit, pickle\nclass Sample: pass\n"
        "atexit.register(lambda: print(len(pickle.dumps(Sample())) > 0))"
    )

    result = run(code, folder=tmp_path)

    assert (result.stdout, result.stderr) == ("True\n", "")


def test_a_script_can_change_the_current_folder(tmp_path: Path) -> None:
    result = run(
        "import os; os.chdir('/'); print(os.path.exists(__file__), __annotations__)",
        folder=tmp_path,
    )

    assert result.stdout == "True {}\n", result.stderr


def test_an_excepthook_of_the_script_reports_its_exception(tmp_path: Path) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, error, _: print(kind.__name__, error)\n"

    result = run(
        hook + "raise ValueError('x')",
        folder=tmp_path,
        PS_TRACEBACK_FILE=str(tmp_path / "traceback"),
    )

    assert (result.returncode, result.stdout, result.stderr) == (1, "ValueError x\n", "")
    assert not (tmp_path / "traceback").exists()


def test_a_failing_excepthook_does_not_hide_the_exception(tmp_path: Path) -> None:
    result = run(
        "import sys\nsys.excepthook = lambda *_: 1 / 0\nraise ValueError('x')", folder=tmp_path
    )

    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert result.stderr.splitlines()[-1] == "ValueError: x"


@pytest.mark.parametrize("safe", [True, False])
def test_the_script_folder_is_prepended_to_sys_path(tmp_path: Path, safe: bool) -> None:
    """Without -P the interpreter has prepended a folder; the script's folder replaces it."""
    (tmp_path / "train.py").write_text("import json, sys; print(json.dumps(sys.path))")
    line = [sys.executable, *(["-P"] if safe else []), "-c"]
    plain = subprocess.run(
        [*line, "import json, sys; print(json.dumps(sys.path))"],
        capture_output=True,
        timeout=LIMIT,
        check=True,
    )
    ours = subprocess.run(
        [*line, RUN, "file", str(tmp_path / "train.py"), ""],
        capture_output=True,
        timeout=LIMIT,
        check=True,
    )

    before, after = json.loads(plain.stdout), json.loads(ours.stdout)

    assert after == [str(tmp_path), *(before if safe else before[1:])]


def test_a_module_is_main_with_the_current_folder_first(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "import sys; print(__name__, __spec__.name, sys.argv[1:], sys.path[0])"
    )

    result = finish(popen("pack.train", "--lr", "1", folder=tmp_path, module=True))

    assert result.stdout.strip() == f"__main__ pack.train ['--lr', '1'] {tmp_path}"


def test_classes_of_a_script_can_be_pickled(tmp_path: Path) -> None:
    result = run(
        "import pickle\nclass Sample: pass\nprint(type(pickle.loads(pickle.dumps(Sample()))) is "
        "Sample)",
        folder=tmp_path,
    )

    assert result.stdout == "True\n", result.stderr


@pytest.mark.parametrize(
    ("code", "status", "err"),
    [
        ("", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_exit_code_and_message_of_a_script_are_preserved(
    tmp_path: Path, code: str, status: int, err: str
) -> None:
    result = run(code, folder=tmp_path)

    assert (result.returncode, result.stderr) == (status, err)


def test_a_traceback_contains_only_frames_of_the_script(tmp_path: Path) -> None:
    result = run("def load():\n    raise ValueError('bad data')\nload()\n", folder=tmp_path)

    assert result.returncode == 1
    assert result.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert 'train.py", line 3, in <module>' in result.stderr.splitlines()[1]
    assert result.stderr.splitlines()[-1] == "ValueError: bad data"
    assert result.stderr.count("Traceback") == 1
    assert "runpy" not in result.stderr


def test_a_syntax_error_names_the_line_of_the_script(tmp_path: Path) -> None:
    result = run("x = = 1\n", folder=tmp_path)

    assert result.returncode == 1
    assert 'train.py", line 1' in result.stderr
    assert result.stderr.splitlines()[-1].startswith("SyntaxError")


def test_a_traceback_file_replaces_the_traceback_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "traceback"

    result = run("raise ValueError('bad data')", folder=tmp_path, PS_TRACEBACK_FILE=str(file))

    assert (result.returncode, result.stderr) == (1, "")
    assert file.read_text().splitlines()[-1] == "ValueError: bad data"


EXPECTED = (
    "from pscommon.core.errors import MismatchError\nraise MismatchError('conv1 has another shape')"
)


def test_an_expected_error_prints_one_line_and_its_exit_code(tmp_path: Path) -> None:
    result = run(EXPECTED, folder=tmp_path)

    assert result.returncode == 11
    (line,) = result.stderr.splitlines()
    assert "conv1 has another shape" in line
    assert "exit code 11" in line


def test_an_expected_error_has_a_traceback_in_debug_mode(tmp_path: Path) -> None:
    result = run(EXPECTED, folder=tmp_path, debug=True)

    assert result.returncode == 11
    assert result.stderr.count("Traceback") == 1
    assert "conv1 has another shape" in result.stderr.splitlines()[-1]


def test_exit_handlers_find_the_raised_exception(tmp_path: Path) -> None:
    code = (
        "import atexit, sys\natexit.register(lambda: print('handler', repr(sys.last_value)))\n"
        "raise ValueError('x')"
    )

    result = run(code, folder=tmp_path)

    assert result.stdout == "handler ValueError('x')\n"


def test_sigterm_unwinds_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import signal\ntry:\n    print('up', flush=True); signal.pause()\nfinally:\n    "
        "print('left')\n"
    )
    process = popen("train.py", folder=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"

    process.send_signal(signal.SIGTERM)

    result = finish(process)
    assert (result.returncode, result.stdout, result.stderr) == (143, "left\n", "")


def test_a_script_that_handles_sigterm_exits_with_0(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import signal, threading\ntold = threading.Event()\nsignal.signal(15, lambda *_: "
        "told.set())\n"
        "print('up', flush=True); told.wait()\nprint('drained')"
    )
    process = popen("train.py", folder=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()

    process.send_signal(signal.SIGTERM)

    result = finish(process)
    assert (result.returncode, result.stdout) == (0, "drained\n")


def test_a_second_sigterm_ends_the_process_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import signal\ntry:\n    print('up', flush=True); signal.pause()\n"
        "finally:\n    print('leaving', flush=True); signal.pause()\n"
    )
    process = popen("train.py", folder=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "leaving\n"

    process.send_signal(signal.SIGTERM)

    assert finish(process).returncode == -signal.SIGTERM


def test_ctrl_c_exits_with_130(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import signal\nprint('up', flush=True); signal.pause()")
    process = popen("train.py", folder=tmp_path)
    assert process.stdout is not None
    process.stdout.readline()

    process.send_signal(signal.SIGINT)

    result = finish(process)
    assert (result.returncode, result.stderr) == (130, "")


@pytest.mark.parametrize(
    ("target", "module", "text"),
    [
        ("nowhere.py", False, "cannot run nowhere.py: there is no such script"),
        ("folder", False, "cannot run folder: it has no __main__.py"),
        ("nowhere", True, "cannot run nowhere: there is no such module"),
        ("pack.nowhere", True, "cannot run pack.nowhere: there is no such module"),
        ("pack", True, "cannot run pack: the package has no __main__"),
    ],
)
def test_a_missing_script_is_a_usage_error(
    tmp_path: Path, target: str, module: bool, text: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()

    result = finish(popen(target, folder=tmp_path, module=module))

    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert text in line


def test_a_failing_package_import_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import does_not_exist")
    (tmp_path / "pack" / "train.py").touch()

    result = finish(popen("pack.train", folder=tmp_path, module=True))

    assert result.returncode == 1
    assert "does_not_exist" in result.stderr.splitlines()[-1]
    assert "Traceback" in result.stderr
