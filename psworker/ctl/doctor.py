"""`ps-ctl doctor`: can this machine run servers and workers?"""

from pathlib import Path

import click

from pscommon.settings.option_types import FOLDER
from psworker.ctl import checks
from psworker.ctl.context import CommandContext, pass_settings, shared
from psworker.ctl.output import Table, show


@click.command(
    epilog="\b\nExamples:\n  ps-ctl doctor\n  ps-ctl doctor --port 50051 --port 50052 --data-dir "
    "/data/job"
)
@click.option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    default=(50051,),
    show_default=True,
    help="A server is to listen here; may be given several times.",
)
@click.option(
    "--data-dir",
    type=FOLDER,
    envvar="PS_DATA_DIR",
    default=".",
    show_default=True,
    help="Snapshots are to be written here.",
)
@shared
@pass_settings
def doctor(settings: CommandContext, ports: tuple[int, ...], data_dir: Path) -> int:
    """Check this machine: Python, devices, ports, disk, calls.

    Exit code 1 if there is a problem; every problem comes with what to do.
    """
    findings = [check() for check in checks.all_checks(ports, data_dir)]
    rows = [(finding.check, finding.state, finding.text) for finding in findings]
    remedies = [(finding.check, finding.remedy) for finding in findings if finding.remedy]
    tables = [
        Table("", ("check", "state", "finding"), rows),
        Table("What to do", ("check", "remedy"), remedies),
    ]
    show(settings.output, [finding._asdict() for finding in findings], lambda: tables)
    return int(any(finding.state == "problem" for finding in findings))
