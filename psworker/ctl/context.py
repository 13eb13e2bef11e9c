"""Options shared by all commands of ps-ctl, accepted before or after the command name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pscommon.security.credentials import use_environment
from pscommon.security.settings import SecuritySettings, security_settings
from pscommon.settings.options import PROTECTION
from pscommon.settings.values import SECONDS, ValueType, addresses
from pscommon.system.local_jobs import only_local_job

if TYPE_CHECKING:
    from psworker.ctl.job_client import CoordinatorClient

PROTECTION_KEYS = frozenset(option.key for option in PROTECTION)


@dataclass(slots=True)
class CommandContext:
    """Values of the shared options.

    Attributes:
        ps: server addresses, HOST:PORT[,...].
        is_ps_flag: whether `ps` comes from the command line, not from the environment.
        output: "table" or "json".
        timeout: seconds for one call to a server.
        protection: options for TLS and tokens that are set, by key.
    """

    ps: str = ""
    is_ps_flag: bool = False
    output: str = "table"
    timeout: float = 10.0
    protection: dict[str, Any] = field(default_factory=dict)

    @property
    def security(self) -> SecuritySettings:
        """Return the settings for TLS and tokens. Raises InvalidRequestError; see there."""
        return security_settings(self.protection)

    def servers(self) -> "CoordinatorClient":
        """Connect to the coordinator; without an address, to the user's only local job.

        Raises:
            InvalidRequestError: no address is set, and the user has no local job or several.
        """
        from psworker.connection.discovery import use_tokens_of
        from psworker.ctl.job_client import CoordinatorClient

        use_environment(self.security)
        servers = (self.ps or only_local_job("`--ps HOST:PORT` is missing").address).split(",")
        return CoordinatorClient(use_tokens_of(servers), self.timeout)


waiting = click.option(
    "--wait",
    type=SECONDS,
    default="300",
    show_default=True,
    help="Maximum time to wait for the result.",
)
pass_settings = click.make_pass_decorator(CommandContext, ensure=True)


def with_environment(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options before the command name; they have environment variables."""
    return _with_options(command, environment=True)


def shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same options after the command name; they take precedence."""
    return _with_options(command, environment=False)


def _with_options(command: Callable[..., Any], environment: bool) -> Callable[..., Any]:
    def option(flag: str, variables: list[str], **rest: Any) -> None:
        nonlocal command
        names = variables if environment else None
        command = click.option(
            flag, envvar=names, expose_value=False, callback=_store_option, **rest
        )(command)

    for each in reversed(PROTECTION):
        variables = list(each.variables)
        if each.is_flag:
            option(each.flag, variables, is_flag=True, default=None, help=each.help)
        else:
            option(each.flag, variables, type=each.type, help=each.help)
    option(
        "--timeout",
        ["PS_TIMEOUT"],
        type=SECONDS,
        help="Deadline of one request to a server [default: 10].",
    )
    option(
        "--output",
        ["PS_OUTPUT"],
        type=click.Choice(["table", "json"]),
        help="Output format [default: table].",
    )
    option(
        "--ps",
        ["PS_PS", "PS_SERVERS"],
        type=ValueType("HOST:PORT[,...]", addresses),
        help="Server addresses; one is enough [default: your only job on this machine].",
    )
    return command


def _store_option(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is None:
        return
    settings = ctx.ensure_object(CommandContext)
    if parameter.name in PROTECTION_KEYS:
        settings.protection[str(parameter.name)] = value
        return
    setattr(settings, str(parameter.name), value)
    if parameter.name == "ps":
        settings.is_ps_flag = ctx.get_parameter_source("ps") is ParameterSource.COMMANDLINE
