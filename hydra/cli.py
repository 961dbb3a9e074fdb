"""The command line: options in, exit code out; the only module that exits.

Holds no work: each command hands its options to hydra/commands/NAME.py, imported when it runs, so that `hydra --help`
loads neither llama.cpp nor numpy nor rich. Answers go to stdout, everything else to stderr. Exit codes: 0 done, 1 a
check or run failed, 2 usage or hydra.toml, 3 to 9 by the tree in hydra/errors.py, 70 a bug of hydra, 130 interrupted.
docs/cli.md is generated from this file.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .errors import ConfigError, HydraError

# Processes that hydra starts of itself: `python -m hydra _engine …`. Not for people, so not in the help.
INTERNAL = {"_engine": "hydra.head.child", "_worker": "hydra.peer.worker"}
# Groups that live beside their subject: module of `app`, and the help line shown without importing it.
LAZY = {"bench": ("hydra.bench.cli", "Measure side by side: stock peer, our peer, link, MTP.")}
EXIT_BUG, EXIT_INTERRUPTED = 70, 130


class LazyGroup(TyperGroup):
    """A group whose members in LAZY are imported when they are run, and listed without that."""

    def list_commands(self, ctx: Any) -> list[str]:
        there = [name for name in LAZY if importlib.util.find_spec(LAZY[name][0])]
        return [*(name for name in super().list_commands(ctx) if name not in LAZY), *there]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in LAZY and cmd_name not in self.commands:
            self.commands[cmd_name] = typer.main.get_command(importlib.import_module(LAZY[cmd_name][0]).app)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in LAZY:
                rows.append((name, LAZY[name][1]))
            elif not self.commands[name].hidden:
                rows.append((name, self.commands[name].get_short_help_str(formatter.width)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(name="hydra", cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None,
                  pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
                  help="One large language model across two modest GPUs in two boxes.")
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                         help="Look at hydra.toml as hydra understands it.")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[str | None, typer.Option(
    "--config", metavar="FILE", help="hydra.toml to use (or HYDRA_CONFIG; else ./, ~/.config/hydra/, /etc/hydra/).")]
NodeName = Annotated[str | None, typer.Option(
    "--node", metavar="NAME", help="Which node of hydra.toml this box is (or HYDRA_NODE; else found out).")]
Setting = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", help="Override one key for this run, such as model.ctx_size=8192. Repeatable.")]
AsJson = Annotated[bool, typer.Option("--json", help="Report as one JSON object, the last line of stdout.")]


def _debug(value: bool) -> None:
    if value:
        os.environ["HYDRA_DEBUG"] = "1"


Debug = Annotated[bool, typer.Option("--debug", callback=_debug, help="Log more; on an error, show the traceback.")]


def settings(pairs: Sequence[str] | None) -> dict[str, str]:
    """`["a.b=1"]` → `{"a.b": "1"}`. Raises: ConfigError where there is no `=`."""
    found = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"command line: --set {pair} has no value.", "Write it as --set KEY=VALUE.")
        found[key.strip()] = value
    return found


# ---- commands ------------------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from . import __version__, console

        console.result(f"hydra {__version__}")
        raise typer.Exit


@app.command("version")
def version_command(as_json: AsJson = False, debug: Debug = False) -> None:
    """Versions of hydra, Python, llama.cpp and the wire protocol."""
    from .commands import version

    version.run(as_json=as_json)


@config_app.command("check")
def config_check(config: ConfigFile = None, node: NodeName = None, set_: Setting = None, as_json: AsJson = False,
                 debug: Debug = False) -> None:
    """Read hydra.toml and say what was understood, or what is wrong with it and where."""
    from .commands import config as command

    command.check(config, node, settings(set_), as_json=as_json)


@config_app.command("show")
def config_show(config: ConfigFile = None, set_: Setting = None,
                origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
                as_json: AsJson = False, debug: Debug = False) -> None:
    """Print every key with the value in force."""
    from .commands import config as command

    command.show(config, settings(set_), origin=origin, as_json=as_json)


# ---- entry ---------------------------------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error has been told on stderr by then."""
    if arguments and arguments[0] in INTERNAL:
        return int(importlib.import_module(INTERNAL[arguments[0]]).main(list(arguments[1:])) or 0)
    command = typer.main.get_command(app)
    try:
        code = command.main(list(arguments), prog_name="hydra", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except HydraError as error:
        return _tell(error, error.message, error.hint, error.exit_code)
    except typer.TyperException as error:
        return _usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our stdout has gone (`hydra … | head`): nobody is left to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _tell(error, f"internal: {type(error).__name__}: {error}",
                     "This is a bug of hydra: run it again with --debug and report the traceback.", EXIT_BUG)


def _usage(error: typer.TyperException) -> int:
    """A command line that cannot be understood: typer's words in our form."""
    context: Any = getattr(error, "ctx", None)
    words = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(words + "\n")
        return error.exit_code
    path = context.command_path if context is not None else "hydra"
    return _tell(error, words, f"`{path} --help` lists what there is.", error.exit_code)


def _tell(error: BaseException, message: str, hint: str, code: int) -> int:
    from . import console

    if os.environ.get("HYDRA_DEBUG"):
        import traceback

        traceback.print_exception(error)
    console.error(message, hint)
    return code


def main() -> None:
    """The `hydra` program."""
    sys.exit(run(sys.argv[1:]))
