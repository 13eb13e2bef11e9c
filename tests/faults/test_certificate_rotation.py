"""Workers push over TLS without a pause while certificates and the CA are replaced."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from pscommon.security.certificates import init_tls
from pscommon.security.credentials import use_credentials
from pscommon.security.tokens import init_tokens
from pscommon.system.small_files import replace_file
from tests.support.certificates import client_credentials
from tests.support.proxied_job import ProxiedJob, lines, wait_for_more_lines
from tests.support.worker_scripts import count_over_tls
from tests.support.workers import counted, status, weights_of

LANES = ("stream", "grpc", "stream", "grpc")
FLAGS = ("--policy", "async", "--durability", "log", "--lease", "60s", "--min-workers", len(LANES))
PAIRS = ("key.pem", "cert.pem", "client-key.pem", "client-cert.pem")
RENEWALS = 10


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ProxiedJob]:
    """Two servers and four workers, whose files are in one folder."""
    security = tmp_path / "security"
    init_tls(security)
    init_tokens(security)
    names = {"--tls-ca": "ca.pem", "--tls-cert": "cert.pem", "--tls-key": "key.pem"}
    files = {flag: security / name for flag, name in {**names, "--token-file": "tokens"}.items()}
    flags = (*FLAGS, *(part for pair in files.items() for part in pair))
    options = {"security": security, "until": tmp_path / "end", "lanes": LANES}
    with ProxiedJob(tmp_path, 2, flags, count_over_tls, **options) as job:
        use_credentials(client_credentials(security, "admin.token"))
        job.start_all(len(LANES))
        yield job


def ca_replacements(security: Path) -> Sequence[Callable[[], object]]:
    """Return the steps by which a new CA replaces the old one (docs/operations/security.md)."""
    new = security.with_name("new")
    init_tls(new)
    old_ca, new_ca = ((folder / "ca.pem").read_text() for folder in (security, new))

    def replace_pairs() -> None:
        for name in PAIRS:
            (new / name).replace(security / name)

    write_ca = partial(replace_file, security / "ca.pem")
    return [partial(write_ca, old_ca + new_ca), replace_pairs, partial(write_ca, new_ca)]


def test_replaced_certificates_lose_no_push(job: ProxiedJob) -> None:
    """Each push counts once, though all connections end after each replacement."""
    security = job.folder / "security"
    workers = [job.processes[f"w{rank}"] for rank in range(len(LANES))]
    renewals = [partial(init_tls, security, renew=True)] * RENEWALS
    for replace in (*renewals, *ca_replacements(security)):
        wait_for_more_lines(workers, "pushed")
        replace()
        for proxy in job.all_proxies:
            proxy.cut()
    wait_for_more_lines(workers, "pushed", times=10)
    (job.folder / "end").touch()
    for worker in workers:
        worker.process.join(30)

    assert [worker.exit_code for worker in workers] == [0] * len(workers), job.all_logs()
    sent = sum(len(lines(worker, "pushed")) for worker in workers)
    assert status(job.address)["steps"] == counted(weights_of(job.address)) == sent
    for name in ("s0", "s1"):
        assert len(lines(job.processes[name], "tls_files_replaced")) >= RENEWALS + 3
