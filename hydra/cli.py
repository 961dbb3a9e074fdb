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
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .errors import ConfigError, HydraError

# Processes that hydra starts of itself: `python -m hydra _engine …`. Not for people, so not in the help.
INTERNAL = ("_engine", "_peer", "_worker", "_inside", "_link")
# Groups that live beside their subject: module of `app`, and the help line shown without importing it.
LAZY = {"bench": ("hydra.bench.cli", "Measure side by side: stock peer, our peer, link, MTP.")}
ALL_LAYERS = ("all", "-1", "-2")  # llama.cpp's spellings of our auto
EXIT_BUG, EXIT_INTERRUPTED = 70, 130


class LazyGroup(TyperGroup):
    """A group whose members in LAZY are imported when they are run, and listed without that."""

    def list_commands(self, ctx: Any) -> list[str]:
        there = [name for name in LAZY if importlib.util.find_spec(LAZY[name][0])]
        return [*(name for name in super().list_commands(ctx) if name not in LAZY), *there]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in LAZY and cmd_name not in self.commands:
            self.commands[cmd_name] = typer.main.get_group(importlib.import_module(LAZY[cmd_name][0]).app)
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


def _words(name: str) -> Callable[[typer.Context, str], list[str]]:
    """What Tab offers for an option: a function of hydra/commands/completion.py, imported when Tab is pressed."""
    def found(ctx: typer.Context, incomplete: str) -> list[str]:
        from .commands import completion

        return getattr(completion, name)(ctx, incomplete)

    return found


app = typer.Typer(name="hydra", cls=LazyGroup, no_args_is_help=True, rich_markup_mode=None, add_completion=False,
                  pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
                  help="One large language model across two modest GPUs in two boxes.")
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                         help="Look at hydra.toml as hydra understands it.")
cache_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The weights that this box keeps for heads.")
certs_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Certificates for TLS between the boxes.")
service_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                          help="This box's node as a systemd service.")
app.add_typer(config_app, name="config")
app.add_typer(cache_app, name="cache")
app.add_typer(certs_app, name="certs")
app.add_typer(service_app, name="service")

ConfigFile = Annotated[str | None, typer.Option(
    "--config", metavar="FILE", help="hydra.toml to use (or HYDRA_CONFIG; else ./, ~/.config/hydra/, /etc/hydra/).")]
NodeName = Annotated[str | None, typer.Option(
    "--node", metavar="NAME", autocompletion=_words("nodes"),
    help="Which node of hydra.toml this box is (or HYDRA_NODE; else found out).")]
Setting = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", autocompletion=_words("pairs"),
    help="Override one key for this run, such as model.ctx_size=8192. Repeatable.")]
CacheDir = Annotated[str, typer.Option("--cache-dir", metavar="DIR", help="Instead of [peer] cache_dir.")]
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


LogFormat = Annotated[str, typer.Option("--log-format", metavar="text|json", envvar="HYDRA_LOG_FORMAT",
                                        autocompletion=_words("log_formats"),
                                        help="Log lines as text or as JSON objects.")]


def _log_json(value: str) -> bool:
    if value not in ("text", "json"):
        raise ConfigError(f"--log-format {value} is not known.", "Use text or json.")
    return value == "json"


# ---- commands ------------------------------------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
         debug: Debug = False) -> None:
    if version:
        from . import __version__, console

        console.result(f"hydra {__version__}")
        raise typer.Exit


@app.command("init")
def init_command(
    model: Annotated[str, typer.Option("--model", "-m", metavar="FILE", show_default=False,
                                       help="The GGUF file on the head box.")] = "",
    head: Annotated[str, typer.Option("--head", metavar="ADDRESS", show_default=False,
                                      help="Address or host name of the head box.")] = "",
    peer: Annotated[str, typer.Option("--peer", metavar="ADDRESS", show_default=False,
                                      help="Address or host name of the peer box.")] = "",
    role: Annotated[str, typer.Option("--role", metavar="head|peer", show_default=False, autocompletion=_words("roles"),
                                      help="What this box is; head if not given.")] = "",
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")] = "hydra.toml",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    debug: Debug = False,
) -> None:
    """Write a hydra.toml for two boxes, from these flags or from answers to a few questions."""
    from .commands import init

    ask = init.ask_at_terminal if sys.stdin is not None and sys.stdin.isatty() else None
    init.run(output, init.Answers(model, head, peer, role), force=force, ask=ask)


@app.command("pull")
def pull_command(
    model: Annotated[str, typer.Argument(
        help="owner/repo/file.gguf, owner/repo:QUANT (such as :Q5_K_M), or its web address.")],
    config: ConfigFile = None,
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", show_default=False,
                                    help="Where to; else where hydra.toml has its model, else ./models.")] = "",
    revision: Annotated[str, typer.Option("--revision", metavar="NAME", show_default=False,
                                          help="Branch, tag or commit; else the newest.")] = "",
    use: Annotated[bool, typer.Option("--use", help="Write its path into hydra.toml.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check the sum of what is there already, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch and replace what is there already.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Fetch a model from Hugging Face, all its parts, checked; the same command goes on after a break."""
    from .commands import pull

    pull.run(model, config, to, revision, force=force, verify=verify, use=use, as_json=as_json)


@app.command("up")
def up_command(
    config: ConfigFile = None,
    node: NodeName = None,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="FILE", help="model.path")] = None,
    ctx_size: Annotated[int | None, typer.Option("--ctx-size", "-c", metavar="N", help="model.ctx_size")] = None,
    batch: Annotated[int | None, typer.Option("--batch-size", "-b", metavar="N", help="model.batch_size")] = None,
    ubatch: Annotated[int | None, typer.Option("--ubatch-size", "-ub", metavar="N", help="model.ubatch_size")] = None,
    type_k: Annotated[str | None, typer.Option("--cache-type-k", "-ctk", metavar="TYPE",
                                               autocompletion=_words("cache_types"), help="model.cache_type_k")] = None,
    type_v: Annotated[str | None, typer.Option("--cache-type-v", "-ctv", metavar="TYPE",
                                               autocompletion=_words("cache_types"), help="model.cache_type_v")] = None,
    flash: Annotated[str | None, typer.Option("--flash-attn", "-fa", metavar="on|off|auto",
                                              autocompletion=_words("switches"), help="model.flash_attn")] = None,
    parallel: Annotated[int | None, typer.Option("--parallel", "-np", metavar="N", help="model.parallel")] = None,
    n_gpu_layers: Annotated[str | None, typer.Option("--n-gpu-layers", "--gpu-layers", "-ngl", metavar="N|all",
                                                     help="model.gpu_layers (with peers: layers of the nodes)"
                                                     )] = None,
    threads: Annotated[int | None, typer.Option("--threads", "-t", metavar="N", help="model.threads")] = None,
    n_max: Annotated[int | None, typer.Option("--spec-draft-n-max", metavar="N",
                                              help="mtp.draft_n_max; 0: no drafting")] = None,
    p_min: Annotated[float | None, typer.Option("--spec-draft-p-min", metavar="P", help="mtp.draft_p_min")] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="head.api_host")] = None,
    port: Annotated[int | None, typer.Option("--port", metavar="N", help="head.api_port")] = None,
    set_: Setting = None,
    detach: Annotated[bool, typer.Option("--detach", "-d",
                                         help="In the background (then: hydra logs, hydra down).")] = False,
    force: Annotated[bool, typer.Option("--force", help="Load it even where `hydra plan` says that it cannot fit."
                                        )] = False,
    log_format: LogFormat = "text",
    debug: Debug = False,
) -> None:
    """Run this box's node of hydra.toml: serve its device (peer), or load the model and serve the API (head)."""
    overrides = {"model.path": os.path.abspath(model) if model else None, "model.ctx_size": ctx_size,
                 "model.batch_size": batch, "model.ubatch_size": ubatch, "model.cache_type_k": type_k,
                 "model.cache_type_v": type_v, "model.flash_attn": flash, "model.parallel": parallel,
                 "model.gpu_layers": "auto" if n_gpu_layers in ALL_LAYERS else n_gpu_layers,
                 "model.threads": None if threads is None else max(0, threads),  # llama.cpp's -1 is our 0
                 "mtp.draft_n_max": n_max or None, "mtp.enabled": False if n_max == 0 else None,
                 "mtp.draft_p_min": p_min, "head.api_host": host, "head.api_port": port, **settings(set_)}
    if detach:
        from .commands import background

        background.detach(config, node, overrides, log_json=_log_json(log_format), debug=debug, force=force)
        return
    from .commands import up

    up.run(config, node, overrides, log_json=_log_json(log_format), debug=debug, force=force)


@app.command("down")
def down_command(config: ConfigFile = None, node: NodeName = None, debug: Debug = False) -> None:
    """Stop this box's node in order, as Ctrl-C would."""
    from .commands import background

    background.down(config, node)


@app.command("reload")
def reload_command(config: ConfigFile = None, node: NodeName = None, debug: Debug = False) -> None:
    """Have the running head read hydra.toml again, without closing its API port."""
    from .commands import background

    background.reload(config, node)


@app.command("logs")
def logs_command(
    config: ConfigFile = None,
    node: NodeName = None,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    debug: Debug = False,
) -> None:
    """Show the log of a node that runs in the background."""
    from .commands import background

    background.logs(config, node, lines, follow)


@app.command("peer")
def peer_command(
    bind: Annotated[str, typer.Option("--bind", metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:50052",
    device: Annotated[str, typer.Option(
        "--device", metavar="NAME", autocompletion=_words("devices"),
        help="ggml device, such as CUDA0, CPU; auto = first GPU, else the CPU.")] = "auto",
    threads: Annotated[int, typer.Option("--threads", "-t", metavar="N",
                                         help="CPU threads where the device is the CPU; 0 = physical cores.")] = 0,
    cache_dir: Annotated[str, typer.Option("--cache-dir", metavar="DIR", help="Keep received weights here.")] = "",
    cache_max_gib: Annotated[float, typer.Option("--cache-max-gib", metavar="N", help="Size limit of that.")] = 64.0,
    model_path: Annotated[str, typer.Option("--model-path", metavar="FILE",
                                            help="The same GGUF on this box: its weights then never cross.")] = "",
    allow: Annotated[list[str] | None, typer.Option(
        "--allow", metavar="ADDRESS", help="An address that may connect besides loopback. Repeatable.")] = None,
    max_connections: Annotated[int, typer.Option("--max-connections", metavar="N", min=1,
                                                 help="Head connections at a time.")] = 4,
    log_format: LogFormat = "text",
    debug: Debug = False,
) -> None:
    """Serve this box's device to a head, without a hydra.toml."""
    from .commands import peer

    peer.run(bind, device, threads, cache_dir, cache_max_gib, model_path, allow or [], max_connections,
             log_json=_log_json(log_format), debug=debug)


@app.command("chat")
def chat_command(
    prompt: Annotated[str, typer.Argument(
        metavar="[PROMPT]", show_default=False, help="The question; piped stdin goes before it. None = talk.")] = "",
    config: ConfigFile = None,
    url: Annotated[str, typer.Option("--url", metavar="URL", envvar="HYDRA_API", show_default=False,
                                     help="The head's address; else [head] of hydra.toml.")] = "",
    system: Annotated[str, typer.Option("--system", "-s", metavar="TEXT", show_default=False,
                                        help="System prompt.")] = "",
    temperature: Annotated[float | None, typer.Option("--temperature", "--temp", metavar="T")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", metavar="P")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="K")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", metavar="P")] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Repeats an answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", metavar="N",
                                                   help="Longest answer, in tokens.")] = None,
    think: Annotated[bool, typer.Option("--think/--hide-think", help="Show the model's reasoning on a terminal, or a "
                                                                     "line about it (Ctrl-T: the other).")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Answers as they are, without Markdown drawn.")] = False,
    stats: Annotated[bool | None, typer.Option("--stats/--no-stats", show_default=False,
                                               help="Figures after an answer, on stderr; a conversation shows them "
                                                    "anyway.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Talk to a running head: one question and its answer, or a conversation."""
    from .commands import chat

    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed,
              "max_tokens": max_tokens}
    chat.run(prompt, config, url, system, params, think=think, stats=stats, plain=plain,
             as_json=as_json)


@app.command("ps")
def ps_command(
    config: ConfigFile = None,
    url: Annotated[str, typer.Option("--url", metavar="URL", envvar="HYDRA_API", show_default=False,
                                     help="The head's address; else [head] of hydra.toml.")] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again and again, until q or Ctrl-C.")] = False,
    seconds: Annotated[float | None, typer.Argument(min=0.1, show_default=False,
                                                    help="With --watch: how often; 2 if not given.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show a running head: its nodes, what is loaded where, and the requests."""
    from .commands import ps

    ps.run(config, url, watch, seconds, as_json=as_json)


@app.command("plan")
def plan_command(
    config: ConfigFile = None,
    node: NodeName = None,
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="FILE", help="model.path")] = None,
    ctx_size: Annotated[int | None, typer.Option("--ctx-size", "-c", metavar="N", help="model.ctx_size")] = None,
    set_: Setting = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no peer what it has: hydra.toml alone.")] = False,
    acceptance: Annotated[float, typer.Option("--acceptance", metavar="P", min=0, max=1,
                                              help="Share of drafted tokens that are right, for MTP's speed.")] = 0.7,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what fits where, how fast it should be, and the smallest change where it does not fit. Loads nothing."""
    from .commands import plan

    overrides = {"model.path": os.path.abspath(model) if model else None, "model.ctx_size": ctx_size, **settings(set_)}
    if plan.run(config, node, overrides, offline=offline, acceptance=acceptance, as_json=as_json):
        raise typer.Exit(1)


@app.command("doctor")
def doctor_command(
    config: ConfigFile = None,
    node: NodeName = None,
    peer: Annotated[list[str] | None, typer.Option(
        "--peer", metavar="HOST:PORT", help="Examine this peer, hydra's or stock, instead of those of hydra.toml. "
                                            "Repeatable.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what is wrong on this box, its peers and the wire between, and how to mend it. Exit code 1 on a failure."""
    from .commands import doctor

    if doctor.run(config, node, peer or [], as_json=as_json):
        raise typer.Exit(1)


@app.command("demo")
def demo_command(
    prompt: Annotated[str, typer.Argument(metavar="[PROMPT]", help="What to begin with.", show_default=False)] = "",
    tokens: Annotated[int, typer.Option("--tokens", "-n", metavar="N", min=1, max=1500,
                                        help="Tokens to generate.")] = 64,
    peer_layers: Annotated[int, typer.Option("--peer-layers", metavar="N", show_default=False,
                                             help="Layers on the peer; half of them if not given.")] = -1,
    model: Annotated[str, typer.Option("--model", "-m", metavar="FILE", show_default=False,
                                       help="Another GGUF than the embedded one.")] = "",
    device: Annotated[str, typer.Option("--device", metavar="NAME", autocompletion=_words("devices"),
                                        help="ggml device for both, such as CUDA0.")] = "CPU",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show all of it on this box: a peer and a head on loopback, an answer, the wire, and that nothing changed."""
    from .commands import demo

    code = demo.run(prompt, tokens, peer_layers, model, device, as_json=as_json)
    if code:
        raise typer.Exit(code)


@app.command("version")
def version_command(as_json: AsJson = False, debug: Debug = False) -> None:
    """Versions of hydra, Python, llama.cpp and the wire protocol."""
    from .commands import version

    version.run(as_json=as_json)


@app.command("completion")
def completion_command(
    shell: Annotated[str, typer.Argument(autocompletion=_words("shells"), show_default=False,
                                         help="bash, zsh or fish; that of $SHELL if not given.")] = "",
    debug: Debug = False,
) -> None:
    """Print a script by which Tab completes commands, options, nodes and keys; for ~/.bashrc and its like."""
    from .commands import completion

    completion.run(shell)


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


@cache_app.command("list")
def cache_list(config: ConfigFile = None, cache_dir: CacheDir = "", as_json: AsJson = False,
               debug: Debug = False) -> None:
    """List them, longest unused first."""
    from .commands import cache

    cache.show(config, cache_dir, as_json=as_json)


@cache_app.command("clear")
def cache_clear(config: ConfigFile = None, cache_dir: CacheDir = "", as_json: AsJson = False,
                debug: Debug = False) -> None:
    """Remove them all; the next load sends what it needs again."""
    from .commands import cache

    cache.clear(config, cache_dir, as_json=as_json)


@certs_app.command("init")
def certs_init(
    config: ConfigFile = None,
    days: Annotated[int, typer.Option("--days", metavar="N", min=1, help="How long they are valid.")] = 825,
    renew: Annotated[bool, typer.Option("--renew", help="Make the nodes' certificates anew; the CA stays.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Make a small private CA and one certificate for each node of hydra.toml."""
    from .commands import certs

    certs.init(config, days, renew, as_json=as_json)


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


@service_app.command("install")
def service_install(
    config: ConfigFile = None,
    node: NodeName = None,
    user: Annotated[str, typer.Option("--user", metavar="NAME", show_default=False,
                                      help="Whom it runs as; whoever called sudo if not given.")] = "",
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start it now, not only at the next boot.")] = True,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Have systemd run this box's node, from the next boot on and now."""
    from .commands import service

    service.install(config, node, user, start=start, dry_run=dry_run)


@service_app.command("uninstall")
def service_uninstall(dry_run: DryRun = False, debug: Debug = False) -> None:
    """Stop the service and remove it."""
    from .commands import service

    service.uninstall(dry_run=dry_run)


@service_app.command("status")
def service_status(as_json: AsJson = False, debug: Debug = False) -> None:
    """Say how the service is. Exit code 1 when it does not run."""
    from .commands import service

    code = service.status(as_json=as_json)
    if code:
        raise typer.Exit(code)


# ---- entry ---------------------------------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every error has been told on stderr by then."""
    if arguments and arguments[0] in INTERNAL:
        return _internal(arguments[0], list(arguments[1:]))
    if arguments and arguments[0] == "help":  # as many programs have it
        arguments = [*arguments[1:], "--help"]
    command = typer.main.get_command(app)
    if "_HYDRA_COMPLETE" in os.environ:
        from typer._completion_classes import completion_init

        completion_init()  # Tab was pressed: see hydra/commands/completion.py
    try:
        code = command.main(list(arguments), prog_name="hydra", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except HydraError as error:
        return _tell(error, error.message, error.hint or error.usual_hint, error.exit_code)
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


def _internal(name: str, arguments: list[str]) -> int:
    if name == "_worker":
        from .peer import worker

        worker.main(int(arguments[0]))
        return 0
    if name == "_inside":
        from .doctor import inside

        return inside.main(arguments)
    if name == "_link":
        from .link import process

        return process.main(arguments)
    if name == "_peer":
        from .peer import launch

        return launch.main(arguments)
    from .head import child

    code = child.main(int(arguments[-1]))
    sys.stderr.flush()
    os._exit(code)  # threads of a peer's connection may still wait inside libggml; nothing is left to be saved


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

    console.error(message, hint, error if os.environ.get("HYDRA_DEBUG") else None)
    return code


def main() -> None:
    """The `hydra` program."""
    sys.exit(run(sys.argv[1:]))
