"""mkdocs hooks: pages from files outside of docs/, and the command reference made from click."""

import posixpath
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "FAULTS.md": "faults.md",
    "SECURITY.md": "threats.md",
    "CHANGELOG.md": "changelog.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "deploy/README.md": "operations/containers.md",
    "benchmarks/results/README.md": "results/index.md",
}
PICTURES = (
    "benchmarks/results/sizes.png",
    "benchmarks/results/growth.png",
    "benchmarks/results/decisions.png",
    "benchmarks/results/phases.png",
)
IN_SITE = {**PAGES, **{path: path.replace("benchmarks/results", "results") for path in PICTURES}}
COMMANDS = {
    "ps-run": "psworker.run.cli:COMMAND",
    "ps-server": "psserver.cli:COMMAND",
    "ps-worker": "psworker.cli:COMMAND",
    "ps-ctl": "psworker.ctl.cli:ps_ctl",
}
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)")
DEFAULT_IN_TEXT = re.compile(r" ?\[default: ([^\]]+)\]")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files from outside of docs/."""
    for path, uri in IN_SITE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links between repository files; append the command reference to its page."""
    uri = page.file.src_uri
    if uri == "reference/commands.md":
        markdown += "".join(map(_command_page, COMMANDS))
    sources = {site: path for path, site in IN_SITE.items()}
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        site = IN_SITE.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(site, posixpath.dirname(uri) or '.')}"

    return LINK.sub(moved, markdown)


def _command_page(name: str) -> str:
    module, _, attribute = COMMANDS[name].partition(":")
    return "\n".join(
        _described(getattr(import_module(module), attribute), click.Context, name, None, 2)
    )


def _described(
    command: click.Command,
    context: Callable[..., click.Context],
    name: str,
    parent: click.Context | None,
    level: int,
) -> Iterator[str]:
    ctx = context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield f"\n{'#' * level} {ctx.command_path}\n"
    yield f"    {ctx.command_path} {usage}\n"
    yield _plain(command.help or "") + "\n"
    yield from _options(command, ctx)
    if command.epilog:
        yield "\n```text\n" + command.epilog.replace("\b\n", "").strip() + "\n```\n"
    if isinstance(command, click.Group):
        for word in sorted(command.commands):
            yield from _described(command.commands[word], context, word, ctx, level + 1)


def _options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    sections: dict[str, list[click.Option]] = {}
    for option in command.get_params(ctx):
        if isinstance(option, click.Option) and not {"--help", "--version"} & {*option.opts}:
            sections.setdefault(getattr(option, "section", "General"), []).append(option)
    for title, options in sorted(sections.items(), key=lambda item: item[0] == "General"):
        yield f"\n| {title} | Environment | Meaning | Default |\n| --- | --- | --- | --- |"
        for option in options:
            yield _row(option, ctx)


def _row(option: click.Option, ctx: click.Context) -> str:
    flag = " ".join(
        [", ".join(option.opts), "" if option.is_flag else option.make_metavar(ctx)]
    ).strip()
    variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    text = _plain(option.help or "")
    stated = DEFAULT_IN_TEXT.search(text)
    default = option.default if isinstance(option.default, str | int | float) else ""
    if option.is_flag:
        default = ""
    names = ", ".join(f"`{name}`" for name in variables)
    meaning = DEFAULT_IN_TEXT.sub("", text).replace("|", r"\|")
    shown = stated[1] if stated else "required" if option.required else default
    return f"| `{flag}` | {names} | {meaning} | {shown} |"


def _plain(text: str) -> str:
    return text.replace("\b\n", "").replace("<", "&lt;")
