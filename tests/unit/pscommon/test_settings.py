"""Settings from flag, environment, file and default, and invalid ones."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from pscommon.settings import options
from pscommon.settings.command import Option, UnsettledValue, given, pick, sources
from pscommon.system.process_limits import usable_memory
from psserver.process.config import ServerConfig
from tests.support.setting_samples import SAMPLES

ALL = [(table, option) for table, members in options.TABLES.items() for option in members]


@pytest.fixture(autouse=True)
def no_external_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, option in ALL:
        for variable in option.variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("PS_CONFIG", raising=False)


def file(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text)
    return str(path)


def parse(table: str, *args: str) -> dict[str, tuple[Any, str]]:
    return {setting.key: (setting.value, setting.source) for setting in options.merged(table, args)}


def refusal(table: str, *args: str) -> str:
    with pytest.raises(click.UsageError) as caught:
        parse(table, *args)
    assert caught.value.exit_code == 2
    return caught.value.format_message()


def test_a_flag_precedes_environment_file_and_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PS_LEASE", "7")
    monkeypatch.setenv("PS_SNAPSHOT_KEEP", "7")
    config = file(tmp_path, "lease = 8\nsnapshot-keep = 8\nmin_workers = 8\n")

    found = parse("server", "--config", config, "--lease", "6")

    assert found["lease"] == (6.0, "flag")
    assert found["snapshot_keep"] == (7, "environment")
    assert found["min_workers"] == (8, "file")
    assert found["join_timeout"] == (300.0, "default")


# a value for every option that is not its default, as text and as TOML
@pytest.mark.parametrize(("table", "option"), ALL, ids=lambda value: getattr(value, "flag", value))
def test_every_flag_has_a_variable_and_a_key(
    table: str, option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, toml = SAMPLES[option.key]
    flag = [option.flag] if option.is_flag else [option.flag, text]

    by_flag = parse(table, *flag)[option.key]
    by_file = parse(table, "--config", file(tmp_path, f"{option.key} = {toml}"))[option.key]
    by_table = parse(table, "--config", file(tmp_path, f"[{table}]\n{option.flag[2:]} = {toml}"))[
        option.key
    ]
    monkeypatch.setenv("PS_" + option.flag[2:].replace("-", "_").upper(), text)
    by_environment = parse(table)[option.key]

    assert by_flag == (by_flag[0], "flag")
    assert by_environment == (by_flag[0], "environment")
    assert by_file == by_table == (by_flag[0], "file")
    assert by_flag[0] != {setting.key: setting.value for setting in defaults(table)}[option.key]


def defaults(table: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for _, option in ALL:
            for variable in option.variables:
                patch.delenv(variable, raising=False)
        return options.merged(table)


def test_addresses_also_come_from_variables_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_SERVERS", "a:1")
    assert parse("worker")["ps"] == ("a:1", "environment")

    monkeypatch.setenv("PS_PS", "b:1")
    assert parse("worker")["ps"] == ("b:1", "environment")


def test_a_variable_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_CONFIG", file(tmp_path, "policy = 'async'"))

    assert parse("server")["policy"] == ("async", "file")


def test_an_empty_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_JOB", "")

    assert parse("server")["job"] == (None, "default")


def test_one_file_serves_the_whole_cluster(tmp_path: Path) -> None:
    config = file(
        tmp_path,
        """
        policy = "ssp"
        staleness = 2
        job = "otter"
        ps = "a:1"
        servers = 2
        [server]
        lease = 9
        log-level = "debug"
        [worker]
        device = "cpu"
        [run]
        max_restarts = 0
        """,
    )

    server, worker, run = (
        parse(table, "--config", config) for table in ("server", "worker", "run")
    )

    assert (server["policy"][0], server["lease"][0], server["log_level"][0]) == (
        "ssp",
        9.0,
        "debug",
    )
    assert (worker["ps"][0], worker["device"][0], worker["job"][0], worker["log_level"][0]) == (
        "a:1",
        "cpu",
        "otter",
        "info",
    )
    assert (run["servers"][0], run["lease"][0], run["device"][0], run["max_restarts"][0]) == (
        2,
        9.0,
        "cpu",
        0,
    )


def test_given_lists_the_explicit_settings(tmp_path: Path) -> None:
    command = options.command("server", "ps-server")

    with command.make_context(
        "ps-server", ["--config", file(tmp_path, "lease = 9"), "--policy", "async"]
    ) as ctx:
        assert given(ctx) == {"lease": 9.0, "policy": "async"}
        assert len(sources(ctx)) == len(options.SERVER)


TABLES = {
    "server": {"lease", "threads", "bind"},
    "worker": {"device", "threads"},
    "run": {"lease", "device", "threads"},
}


def chosen(document: dict[str, Any]) -> dict[str, Any]:
    return pick(document, TABLES, ("server", "worker", "run"), TABLES["run"])


def test_pick_takes_the_settings_of_its_command() -> None:
    document = {
        "lease": 1,
        "bind": "x",
        "server": {"lease": 2, "bind": "y"},
        "worker": {"device": "cpu"},
    }

    assert chosen(document) == {"lease": 2, "device": "cpu"}


def test_pick_prefers_the_table_of_its_command() -> None:
    document = {"server": {"threads": 1}, "worker": {"threads": 2}}

    assert chosen(document) == {"threads": UnsettledValue("run")}
    assert chosen({**document, "run": {"threads": 3}}) == {"threads": 3}
    assert chosen({"server": {"threads": 2}, "worker": {"threads": 2}}) == {"threads": 2}


def test_a_flag_or_variable_settles_conflicting_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = file(tmp_path, "[server]\nlog_level = 'debug'\n[worker]\nlog_level = 'error'")

    message = refusal("run", "--config", config)
    assert "'--log-level' (file " in message
    assert "the tables disagree; set it in [run], or use --log-level" in message
    assert parse("run", "--config", config, "--log-level", "info")["log_level"] == ("info", "flag")
    monkeypatch.setenv("PS_LOG_LEVEL", "warning")
    assert parse("run", "--config", config)["log_level"] == ("warning", "environment")


BAD_FILES = {
    "a typo": ("polcy = 'sync'", "unknown key 'polcy'; did you mean 'policy'?"),
    "a typo in a table": (
        "[worker]\ndevise = 'cpu'",
        "unknown key 'devise' in [worker]; did you mean 'device'?",
    ),
    "a key of another command's in a table": (
        "[worker]\nlease = 3",
        "unknown key 'lease' in [worker]",
    ),
    "an unknown table": ("[servers]\nlease = 3", "unknown table [servers]; did you mean 'server'?"),
    "nothing alike": ("qqq = 1", "unknown key 'qqq'; known are"),
    "both spellings": ("data-dir = 'a'\ndata_dir = 'b'", "given twice"),
    "no TOML": ("policy = ", "cluster.toml: "),
    "a wrong value": ("lease = -1", "'--lease' (file "),
    "a wrong word": ("min_workers = 'many'", "cluster.toml): 'many' is not a whole number from 1"),
    "half a worker": (
        "min_workers = 2.9",
        "2.9 has the wrong type; the file must have text in quotes or a whole number here",
    ),
    "half a thread": ("threads = 1.5", "'--threads' (file "),
    "true for a number": ("min_workers = true", "True has the wrong type"),
    "names in a list": (
        "job = ['a', 'b']",
        "['a', 'b'] has the wrong type; the file must have text in quotes here",
    ),
    "a name that is a number": ("job = 1.10", "1.1 has the wrong type"),
    "a choice in a list": ("policy = ['sync']", "the file must have text in quotes here"),
    "a folder that is a number": ("data_dir = 5", "'--data-dir' (file "),
    "folders in a list": ("data_dir = ['a']", "['a'] has the wrong type"),
    "true for a file": ("port_file = true", "True has the wrong type"),
    "a number for a flag": (
        "exit_when_done = 7",
        "the file must have text in quotes or true or false here",
    ),
    "a day for a time": ("lease = 2026-01-01", "text in quotes or a number here"),
    "a time that is no number": ("lease = inf", "is not a time above zero"),
    "a table in a table": ("[server]\nlease = {h = 1}", "{'h': 1} has the wrong type"),
}


@pytest.mark.parametrize(("text", "expected"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal("server", "--config", file(tmp_path, text))


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    assert parse("server", "--config", file(tmp_path, "\ufefflease = 9"))["lease"] == (9.0, "file")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal("server", "--config", str(tmp_path / "no.toml"))


def test_addresses_in_a_list_must_be_strings(tmp_path: Path) -> None:
    assert "[1, 'a:1'] has the wrong type" in refusal(
        "worker", "--config", file(tmp_path, "ps = [1, 'a:1']")
    )
    assert "names an address twice" in refusal(
        "worker", "--config", file(tmp_path, "ps = ['a:1', 'a:1']")
    )


def test_a_top_level_key_of_another_command_is_accepted(tmp_path: Path) -> None:
    assert "device" not in parse("server", "--config", file(tmp_path, "device = 'cpu'"))


def test_a_bad_value_is_reported_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'--lease': " in refusal("server", "--lease", "x")
    monkeypatch.setenv("PS_LEASE", "x")
    assert "'--lease' (environment PS_LEASE)" in refusal("server")
    monkeypatch.setenv("PS_SERVERS", "nowhere")
    assert "'--ps' (environment PS_SERVERS)" in refusal("worker")


def test_a_flag_with_a_typo_gets_a_suggestion() -> None:
    assert "--policy" in refusal("server", "--polcy", "sync")


BAD_VALUES = [
    ("server", "--shard", "2/2", "counted from 0"),
    ("server", "--shard", "0/0", "counted from 0"),
    ("server", "--shard", "-1/2", "is not I/N"),
    ("server", "--shard", "1", "is not I/N"),
    ("server", "--bind", "localhost", "is not HOST:PORT"),
    ("server", "--bind", ":50051", "is not HOST:PORT"),
    ("server", "--bind", "host:65536", "from 0 to 65535"),
    ("server", "--bind", "::1:80", "is not HOST:PORT"),
    ("server", "--bind", "http://host:80", "is not HOST:PORT"),
    ("server", "--bind", "é:0", "is not HOST:PORT"),
    ("server", "--bind", "h\udcff:0", "is not HOST:PORT"),
    ("server", "--bind", "[]:0", "is not HOST:PORT"),
    ("server", "--bind", "[::1:0", "is not HOST:PORT"),
    ("server", "--bind", "[127.0.0.1]:0", "is not HOST:PORT"),
    ("server", "--bind", "a b:0", "is not HOST:PORT"),
    ("server", "--metrics-bind", "[]:0", "is not HOST:PORT"),
    ("server", "--metrics-bind", "[::g]:0", "is not HOST:PORT"),
    ("worker", "--ps", "host:1,é:1", "is not HOST:PORT"),
    ("server", "--join", "host:0", "from 1 to 65535"),
    ("server", "--advertise", "host:", "from 1 to 65535"),
    ("server", "--snapshot-every", "60", "neither a time"),
    ("server", "--snapshot-every", "0steps", "neither a time"),
    ("server", "--snapshot-every", "0s", "neither a time"),
    ("server", "--snapshot-every", "", "neither a time"),
    ("server", "--lease", "0", "above zero"),
    ("server", "--lease", "1.2.3", "above zero"),
    ("server", "--resume", "latest", "auto, never or a version"),
    ("server", "--min-workers", "0", "from 1 to 2147483647"),
    ("server", "--snapshot-keep", "0", "from 1 to 2147483647"),
    ("server", "--staleness", "-1", "from 0 to 2147483647"),
    ("server", "--policy", "bsp", "'sync', 'async', 'ssp'"),
    ("server", "--job", "j\udcff", r"'j\udcff' is not UTF-8"),
    ("worker", "--job", "j\udcff", r"'j\udcff' is not UTF-8"),
    ("worker", "--ps", "a:1,a:1", "twice"),
    ("worker", "--ps", ",", "no address"),
    ("worker", "--ps", "a:1,b", "is not HOST:PORT"),
    ("worker", "--device", "gpu", "auto, cpu, cuda"),
    ("server", "--in-flight", "0", "is not a number of bytes"),
    ("server", "--in-flight", "lots", "is not a number of bytes"),
    ("server", "--lanes", "udp", "'auto', 'shm', 'stream', 'grpc'"),
    ("worker", "--lanes", "udp", "'auto', 'shm', 'stream', 'grpc'"),
    ("worker", "--overlap", "yes", "'off', 'on'"),
    ("run", "--in-flight", "-1", "is not a number of bytes"),
    ("server", "--lease", "1200h", "'1200h' is longer than 1000h"),
    ("server", "--lease", "9" * 400, "longer than 1000h"),
    ("server", "--snapshot-every", "1001h", "longer than 1000h"),
    ("server", "--snapshot-every", "9" * 5000 + "steps", "is not a whole number"),
    ("server", "--on-worker-loss", "wait:1001h", "longer than 1000h"),
    ("worker", "--preemption-notice", "https://host/", "is neither the path"),
    ("worker", "--preemption-notice", "http://", "is neither the path"),
    ("server", "--scale-workers", "4", "is not MIN..MAX"),
    ("server", "--scale-workers", "8..2", "is not MIN..MAX"),
    ("server", "--scale-workers", "0..2", "is not MIN..MAX"),
    ("run", "--scale-workers", "1..99999", "is not MIN..MAX"),
    ("server", "--shard", "0/2147483648", "from 0 to 2147483647"),
    ("server", "--staleness", "2147483648", "from 0 to 2147483647"),
    ("server", "--resume", "9223372036854775808", "from 0 to 9223372036854775807"),
    ("server", "--in-flight", "9" * 400, "is not a number of bytes"),
    ("server", "--in-flight", "9223373TB", "is not a number of bytes"),
    ("run", "--workers", "0", "from 1 to 2147483647"),
    ("run", "--max-restarts", "-1", "from 0 to 2147483647"),
]


@pytest.mark.parametrize(("table", "flag", "value", "expected"), BAD_VALUES)
def test_bad_values_are_refused(table: str, flag: str, value: str, expected: str) -> None:
    assert expected in refusal(table, flag, value)


PLACES = [(table, option) for table, option in ALL if isinstance(option.type, click.Path)]


@pytest.mark.parametrize(
    ("table", "option"), PLACES, ids=lambda value: getattr(value, "flag", value)
)
def test_an_empty_path_is_not_the_current_folder(
    table: str, option: Option, tmp_path: Path
) -> None:
    assert "is empty; '.' is" in refusal(table, option.flag, "")
    assert "is empty; '.' is" in refusal(table, "--config", file(tmp_path, f"{option.key} = ''"))


def test_half_of_the_memory_is_in_flight_by_default() -> None:
    limits = []
    for line in ([], ["--in-flight", "3MB"]):
        with options.command("server", "ps-server").make_context("ps-server", line) as ctx:
            limits.append(ServerConfig.from_settings(ctx.params).in_flight)

    assert limits == [usable_memory() // 2, 3_000_000]


def test_merged_values_can_be_shown() -> None:
    shown = {
        setting.key: str(setting.value)
        for setting in options.merged("server", ["--snapshot-every", "10m"])
    }

    assert json.loads(json.dumps(shown))["snapshot_every"] == "600s"
    assert shown["shard"] == "0/1"


REMOVED = [("server", "--late-gradients"), ("server", "--shipping"), ("worker", "--malloc")]


@pytest.mark.parametrize(("table", "flag"), REMOVED)
def test_a_removed_setting_is_refused_by_name(table: str, flag: str, tmp_path: Path) -> None:
    (file := tmp_path / "ps.toml").write_text(f"{flag.removeprefix('--')} = 'sync'")

    assert f"`{flag}` was removed: " in refusal(table, flag, "sync")
    assert "was removed: " in refusal(table, "--config", str(file))
