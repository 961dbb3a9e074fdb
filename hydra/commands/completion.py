"""`hydra completion`: a script for bash, zsh or fish by which Tab completes commands, options, nodes and keys.

The script asks hydra itself (`_HYDRA_COMPLETE`), so it never falls behind. What an option may be completed with is
here; what there is to complete is typer's. Nothing is loaded but hydra.toml, and a faulty one completes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from typer._completion_shared import get_completion_script

from .. import config, console
from ..errors import ConfigError, HydraError
from ..keys import CACHE_TYPES, TABLES, Key, NodeConfig, keys_of

VARIABLE = "_HYDRA_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
PLACES = {
    "bash": "In ~/.bashrc: source <(hydra completion bash)",
    "zsh": "In ~/.zshrc, after compinit: source <(hydra completion zsh)",
    "fish": "hydra completion fish > ~/.config/fish/completions/hydra.fish",
}
# typer's own splits words at `=` and `:`, as readline does, and so cannot complete KEY=VALUE or URLs.
BASH = """\
_hydra_completion() {
    local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}" word="" words reply
    read -r -d '' -a words < <(printf '%s\\0' "${line//[[:blank:]]/$'\\n'}")
    [[ $line == *[[:blank:]] ]] || word="${words[${#words[@]}-1]}"
    local count=${#words[@]}
    [[ -z $word ]] || count=$((count - 1))
    COMPREPLY=()
    while read -r reply; do
        # What is before the last = or : stays as it is: readline replaces only what comes after it.
        local kept="${word%"${word##*[=:]}"}"
        [[ -z $reply ]] || COMPREPLY+=("${reply#"$kept"}")
    done < <(COMP_WORDS="${words[*]}" COMP_CWORD=$count _HYDRA_COMPLETE=complete_bash "$1" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -ne 1 || ${COMPREPLY[0]} != *= ]] || compopt -o nospace
}
complete -o default -F _hydra_completion hydra"""


def run(shell: str) -> None:
    """Print the script of a shell, and where it goes. shell: empty = that of $SHELL. Raises: ConfigError."""
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise ConfigError(f"There is no completion for {name or 'a shell that is not named'}.",
                          f"Name one: hydra completion {'|'.join(SHELLS)}.")
    console.result(BASH if name == "bash" else get_completion_script(
        prog_name="hydra", complete_var=VARIABLE, shell=name))
    if console.out().is_terminal:
        console.note(f"# {PLACES[name]}")


# ---- what options are completed with -------------------------------------------------------------------------------


def one_of(*words: str) -> Callable[[typer.Context, str], list[str]]:
    """A completion from a list."""
    def found(_ctx: typer.Context, incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return found


cache_types = one_of(*CACHE_TYPES)
switches = one_of("on", "off", "auto")
log_formats = one_of("text", "json")
roles = one_of("head", "peer")
devices = one_of("auto", "CPU", "CUDA0", "CUDA1")
shells = one_of(*SHELLS)


def nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """The nodes of hydra.toml."""
    cfg = _config(ctx)
    return [node.name for node in cfg.nodes if node.name.startswith(incomplete)] if cfg else []


def pairs(ctx: typer.Context, incomplete: str) -> list[str]:
    """KEY=VALUE: the keys, and once one is meant what it may be, or is."""
    cfg = _config(ctx)
    now = cfg.values() if cfg else {}
    found = [(name, key) for name, key in _keys(cfg) if name.startswith(incomplete.partition("=")[0])]
    if len(found) > 1 and "=" not in incomplete:
        return [f"{name}=" for name, _ in found]
    written = [f"{name}={value}" for name, key in found for value in _values(key, now.get(name)) or [""]]
    return [text for text in written if text.startswith(incomplete)]


def _values(key: Key, now: object) -> list[str]:
    if key.kind == "bool":
        return ["true", "false"]
    if key.choices:
        return list(key.choices)
    return [] if key.secret or now in (None, "", ()) else [", ".join(now) if isinstance(now, tuple) else str(now)]


def _keys(cfg: config.Config | None) -> Iterator[tuple[str, Key]]:
    for table, cls in TABLES.items():
        for name, key in keys_of(cls).items():
            yield f"{table}.{name}", key
    for node in cfg.nodes if cfg else ():
        for name, key in keys_of(NodeConfig).items():
            yield f"nodes.{node.name}.{name}", key


def _config(ctx: typer.Context) -> config.Config | None:
    try:
        return config.load(ctx.params.get("config"))
    except HydraError:
        return None
