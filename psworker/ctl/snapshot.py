"""`ps-ctl snapshot`: snapshots of a running job or of a data directory."""

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pscommon.core.errors import SnapshotError
from pscommon.settings.values import FILE, VERSION
from psworker.ctl import views
from psworker.ctl.context import CommandContext, pass_settings, shared, waiting
from psworker.ctl.output import Table, show, show_fields, size

if TYPE_CHECKING:
    from pscommon.snapshot import SnapshotDirectory

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(
    epilog="""\b
Examples:
  ps-ctl --ps host0:50051 snapshot save
  ps-ctl snapshot list /data/job
  ps-ctl snapshot verify /data/job
  ps-ctl snapshot export /data/job model.safetensors --version 1200
  ps-ctl snapshot export /data/job/snapshots/000000001200 model.safetensors
  ps-ctl --ps host0:50051 snapshot restore 1200

DIR is the --data-dir of the servers, or the path of one snapshot as printed by `snapshot list`.
verify, export and list DIR work without servers."""
)
def snapshot() -> None:
    """Save, list, verify, export and restore snapshots."""


@snapshot.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 snapshot save --wait 10m")
@waiting
@shared
@pass_settings
def save(settings: CommandContext, wait: float) -> None:
    """Take a snapshot and wait until it is on disk."""
    with settings.servers() as servers:
        version, path = servers.save(wait)
    document = {"version": version, "path": path}
    show_fields(settings.output, document)


@snapshot.command(epilog="\b\nExample:\n  ps-ctl --ps host0:50051 snapshot restore 1200")
@click.argument("version", metavar="VERSION", type=VERSION)
@waiting
@shared
@pass_settings
def restore(settings: CommandContext, version: int, wait: float) -> None:
    """Roll a running job back to the snapshot of VERSION.

    All shards restore weights, optimizer state and data position together. Newer snapshots are
    moved aside. Workers rejoin and continue from there; LR schedulers belong to the scripts and
    keep their state. Exit code 12 if the snapshot is missing or damaged.
    """
    with settings.servers() as servers:
        servers.restore(version, wait)
    document = {"job": servers.described.job, "version": version, "state": "restored"}
    show_fields(settings.output, document)


@snapshot.command(
    "list",
    epilog="\b\nExamples:\n  ps-ctl --ps host0:50051 snapshot list\n  ps-ctl snapshot list "
    "/data/job",
)
@click.argument("directory", metavar="[DIR]", type=DIRECTORY, required=False)
@shared
@pass_settings
def list_(settings: CommandContext, directory: Path | None) -> None:
    """List snapshots of DIR or of the job.

    The command does not read their parts; `verify` does.
    """
    if directory is not None:
        snapshots, only = _snapshots(directory, None)
        versions = snapshots.versions() if only is None else [only]
        rows = [_row(snapshots, version) for version in versions]
    else:
        with settings.servers() as servers:
            rows = [
                {"state": "complete", **row} for row in views.rows(servers.status(), "snapshots")
            ]
    show(settings.output, rows, lambda: [views.snapshots(rows)])


@snapshot.command(
    epilog="\b\nExamples:\n  ps-ctl snapshot verify /data/job\n  ps-ctl snapshot verify /data/job "
    "--version 1200"
)
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.option("--version", type=VERSION, help="Version to check [default: all].")
@shared
@pass_settings
def verify(settings: CommandContext, directory: Path, version: int | None) -> int:
    """Verify the checksums of the snapshots in DIR.

    Exit code 12 if a snapshot is damaged.
    """
    snapshots, version = _snapshots(directory, version)
    versions = [version] if version is not None else snapshots.versions()
    rows = [_verified(snapshots, each) for each in versions]
    problems = [(row["version"], problem) for row in rows for problem in row["problems"]]
    tables = [views.snapshots(rows), Table("Problems", ("version", "problem"), problems)]
    show(settings.output, rows, lambda: tables)
    return SnapshotError.exit_code if problems else 0


@snapshot.command(epilog="\b\nExample:\n  ps-ctl snapshot export /data/job model.safetensors")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.argument("file", type=FILE)
@click.option("--version", type=VERSION, help="Version to export [default: the newest valid].")
@shared
@pass_settings
def export(settings: CommandContext, directory: Path, file: Path, version: int | None) -> None:
    """Write the weights to a safetensors FILE.

    Load it with torch: model.load_state_dict(safetensors.torch.load_file(FILE)).
    """
    from pscommon import snapshot as snapshot_package

    snapshots, version = _snapshots(directory, version)
    if version is None:
        version = _newest(snapshots)
    snapshot_package.export(snapshots, version, file)
    nbytes = file.stat().st_size
    document = {"version": version, "file": str(file), "nbytes": nbytes}
    show(
        settings.output,
        document,
        lambda: [Table("", (), [*list(document.items())[:2], ("bytes", size(nbytes))])],
    )


def _snapshots(directory: Path, version: int | None) -> "tuple[SnapshotDirectory, int | None]":
    """Return the snapshots of a data directory, and the version if DIR or --version selects one.

    Raises:
        SnapshotError: there is no snapshot.
        click.UsageError: DIR and --version select different snapshots.
    """
    from pscommon.snapshot import SnapshotDirectory

    path = directory.resolve()
    one = int(path.name) if path.name.isdecimal() and path.parent.name == "snapshots" else None
    snapshots = SnapshotDirectory(path.parent.parent if one is not None else directory)
    if one is not None and version not in (None, one):
        raise click.UsageError(
            f"`--version {version}` is not valid: DIR is the snapshot of version {one}. "
            f"Try: leave out `--version`"
        )
    if not snapshots.versions() or (one is not None and one not in snapshots.versions()):
        raise SnapshotError(
            f"there are no snapshots in {directory}. Try: the `--data-dir` of the servers, or a "
            f"path printed by `snapshot list`"
        )
    return snapshots, version if one is None else one


def _newest(snapshots: "SnapshotDirectory") -> int:
    newest = snapshots.newest_valid()
    for reason in newest.skipped:
        click.echo(f"ps-ctl: skipped a damaged snapshot: {reason}", err=True)
    if newest.manifest is None:
        raise SnapshotError(
            f"no snapshot in {snapshots.folder} is valid. Try: `ps-ctl snapshot verify DIR`, which "
            "shows the damage"
        )
    return newest.manifest.version


def _row(snapshots: "SnapshotDirectory", version: int) -> dict[str, Any]:
    path = str(snapshots.path(version).resolve())
    try:
        manifest = snapshots.manifest(version)
    except SnapshotError as error:
        return {"version": version, "path": path, "state": "damaged", "problem": str(error)}
    absent = [part.file for part in snapshots.absent(manifest)]
    return {
        "version": version,
        "path": path,
        "state": "complete"
        if not absent
        else f"{len(absent)} of {manifest.shards} parts elsewhere",
        "nbytes": manifest.nbytes,
        "seconds": time.time() - datetime.fromisoformat(manifest.created).timestamp(),
        "job": manifest.job,
        "shards": manifest.shards,
        "created": manifest.created,
        "absent": absent,
    }


def _verified(snapshots: "SnapshotDirectory", version: int) -> dict[str, Any]:
    problems = snapshots.verify(version)
    row = _row(snapshots, version)
    state = "damaged" if problems else row["state"].replace("complete", "sound")
    return {**row, "state": state, "problems": problems}
