"""From the table of settings to the options of a command."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, get_args, get_origin

import typer

from tpuport.cli.asked.environment import DEFAULT_MODEL
from tpuport.cli.asked.settings import (
    TABLE,
    gather,
    in_batch,
    in_server,
    take_own_options,
)
from tpuport.cli.shown.errors import reported
from tpuport.core.spec.run_settings import COMMANDS, FILES, Setting, in_words
from tpuport.errors import UsageError

#: The commands that read a YAML file.
WITH_A_FILE = "GEPCQV"
#: The commands with the flags of many requests.
OF_MANY = {"Q": in_batch, "V": in_server}
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file with any of these; flags win.",
        callback=take_own_options,
        is_eager=True,
        rich_help_panel=FILES,
    ),
]


def flag(words: str, help: str, **more: Any) -> Any:
    """An option that one command alone has.

    Args:
        words: its flags and the name of its value, as in the table of settings.
        more: as Typer has it.
    """
    flags, metavar = in_words(words)
    return typer.Option(*flags, help=help, metavar=metavar, **more)


def command(
    name: str, /, **about: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags that the table of settings has for it.

    The function is called with the settings, and by name with its own options and,
    where it has a parameter ``context``, with Typer's. Its errors are reported.

    Args:
        about: the command's own options and arguments, by parameter; and words in
            place of the table's.
    """
    letter = next(letter for letter, known in COMMANDS.items() if known == name)

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()

        def run(context: typer.Context, **given: Any) -> None:
            with reported(debug=given["debug"]) as guard:
                settings = gather(context, "G" if letter in OF_MANY else letter)
                guard.debug = settings.debug
                values = {"context": context, **given}
                with _naming(settings.config):
                    function(settings, **{p.name: values[p.name] for p in own})

        parameters = {
            "context": _parameter("context", typer.Context, inspect.Parameter.empty),
            **{p.name: _parameter(p.name, p.annotation, p.default) for p in own},
        }
        for setting in TABLE.values():
            many = OF_MANY.get(letter)
            if many(setting) if many else letter in setting.commands:
                default = False if setting.takes is bool else None
                made = _parameter(setting.key, _annotation(setting), default)
                parameters.setdefault(setting.key, made)
        for key, said in about.items():
            kind: Any = parameters[key].annotation
            if get_origin(kind) is Annotated:  # of the table
                kind = get_args(kind)[0]
            parameters[key] = parameters[key].replace(annotation=Annotated[kind, said])
        if letter in WITH_A_FILE:
            parameters["config"] = _parameter("config", Config, None)
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            list(parameters.values())
        )
        run.__annotations__ = {p.name: p.annotation for p in parameters.values()}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return run

    return wrap


@contextlib.contextmanager
def _naming(config: tuple[str, ...]) -> Iterator[None]:
    """Let an error in the settings say which of them a file gave, and which file."""
    try:
        yield
    except UsageError as error:
        wrong = config and error.exit_code == UsageError.exit_code
        if wrong and config[0] not in str(error):
            error.add_note(f"{config[0]} gives: {', '.join(config[1:])}")
        raise


def given_flags(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The flags of these parameters that are on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        "--" + name.replace("_", "-")
        for name, source in sources.items()
        if getattr(source, "name", "") == "COMMANDLINE"
    ]


def refuse_options(context: typer.Context) -> None:
    """Refuse options before the name of a subcommand, which would drop them."""
    for flag in given_flags(context, context.params):
        sub = context.invoked_subcommand
        raise UsageError(
            f"{flag} before {sub!r} would not be used; put options after "
            f"`{context.command_path} {sub}`"
        )


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _annotation(setting: Setting) -> Any:
    takes = setting.takes if setting.takes is bool else setting.takes | None
    option = typer.Option(
        *setting.flags,
        help=setting.help.replace("{DEFAULT_MODEL}", DEFAULT_MODEL),
        metavar=setting.metavar,
        envvar=setting.envvar,
        rich_help_panel=setting.panel,
    )
    return Annotated[takes, option]
