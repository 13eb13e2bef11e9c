"""`ps-ctl tls` and `ps-ctl token`: make certificates and tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pscommon.security.certificates import init_tls
from pscommon.security.secret_files import FileStates
from pscommon.security.tokens import init_tokens
from pscommon.settings.values import FOLDER
from psworker.ctl.context import CommandContext, pass_settings
from psworker.ctl.output import Table, show


def _into_folder(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument DIR and the option --output; these commands contact no server."""
    output = click.option(
        "--output", type=click.Choice(["table", "json"]), help="Output format [default: table]."
    )
    return click.argument("folder", metavar="DIR", type=FOLDER)(output(pass_settings(command)))


@click.group(
    epilog="""\b
Examples:
  ps-ctl tls init certificates
  ps-ctl tls init certificates --renew"""
)
def tls() -> None:
    """Make certificates for TLS."""


@tls.command(
    "init",
    epilog="""\b
Examples:
  ps-ctl tls init certificates
  ps-ctl tls init certificates --host ps.example.org --host 10.0.0.7
  ps-ctl tls init certificates --renew

\b
Servers:  --tls-ca ca.pem --tls-cert cert.pem --tls-key key.pem
Others:   --tls-ca ca.pem --tls-cert client-cert.pem --tls-key client-key.pem

ca-key.pem signs certificates. No process needs it: keep it away from the machines of the job.""",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Further DNS name or IP address of servers, for browsers; repeat for several.",
)
@click.option(
    "--renew", is_flag=True, help="Replace both certificates and keys; the CA and the names stay."
)
@_into_folder
def tls_init(
    settings: CommandContext,
    folder: Path,
    hosts: tuple[str, ...],
    renew: bool,
    output: str | None,
) -> None:
    """Make a CA and certificates for servers and clients in DIR.

    One pair of files serves all servers: processes accept them by the name paramserver, at any
    address. The CA is valid for 10 years, the certificates for one. Existing files are kept.
    Processes read new files without a restart.
    """
    _show(output or settings.output, init_tls(folder, hosts, renew))


@click.group(epilog="\b\nExample:\n  ps-ctl token init tokens")
def token() -> None:
    """Make tokens for the roles of processes."""


@token.command(
    "init",
    epilog="""\b
Example:
  ps-ctl token init tokens

\b
Servers:    --token-file tokens/tokens        all roles, lines ROLE TOKEN
Workers:    --token-file tokens/worker.token
People:     --token-file tokens/admin.token
Prometheus: credentials_file: tokens/read.token""",
)
@_into_folder
def token_init(settings: CommandContext, folder: Path, output: str | None) -> None:
    """Make a token of each role in DIR: worker, server, admin and read.

    Existing files are kept.
    """
    _show(output or settings.output, init_tokens(folder))


def _show(form: str, states: FileStates) -> None:
    rows = [{"file": str(path), "state": state} for path, state in states.items()]
    cells = [(row["file"], row["state"]) for row in rows]
    show(form, rows, lambda: [Table("", ("file", "state"), cells)])
