"""docs/config.md and docs/cli.md, made from hydra/keys.py and hydra/cli.py so that they cannot fall behind.

`python -m hydra.commands.reference` writes both; tests compare them with what is committed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..keys import TABLES, Key, NodeConfig, keys_of

CONFIG_HEAD = """\
# hydra.toml

Every key, its type, default and meaning. One file serves all boxes; `hydra.toml.example` is a good start and
`hydra config check` says what was understood. This page is generated from `hydra/keys.py`
(`python -m hydra.commands.reference`).

Precedence: command line (`--set model.ctx_size=8192`, or an option of its own) > environment
(`HYDRA_MODEL_CTX_SIZE=8192`, `HYDRA_NODES_MINI_LAYERS=24`) > file > default. `hydra config show --origin` says which
one won. A key, table or `HYDRA_` variable that does not exist is an error with a suggestion. Relative paths count from
the place of hydra.toml; `~` is the home of whoever runs hydra.

The file is looked for at `--config FILE`, `HYDRA_CONFIG`, `./hydra.toml`, `~/.config/hydra/hydra.toml` and
`/etc/hydra/hydra.toml`, in this order.
"""
ABOUT = {
    "nodes": "One table for each box, exactly one with `role = \"head\"`. The layers of all nodes add up to the "
             "model's; the head's number may count the MTP block, which always lives there.",
    "peer": "Settings of every peer box. Paths may differ from box to box: they are not part of the digest by which "
            "the boxes compare their files.",
}
CLI_HEAD = """\
# The command line

Generated from `hydra/cli.py` (`python -m hydra.commands.reference`); the text of `hydra COMMAND --help`.

Answers go to stdout, everything else to stderr. With `--json` the last line of stdout is one JSON object. An error is
one line that says what happened and one that says what to do; `--debug` adds the traceback.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a check found a failure, or a result is not as it must be |
| 2 | the command line or hydra.toml cannot be used |
| 3 | llama.cpp's libraries are missing, wrong or of another version |
| 4 | a compute device is missing, out of memory or failed |
| 5 | something about the other box: not reachable, another version |
| 6 | bytes on the wire that the protocol does not allow |
| 7 | a model file that cannot be fetched, read, split or fitted |
| 8 | the engine failed |
| 9 | one request cannot be served |
| 70 | a bug of hydra |
| 130 | interrupted |
"""
KINDS = {"int": "integer", "float": "number", "bool": "true/false", "str": "text", "path": "path",
         "list": "list of texts", "layers": "integer or \"auto\"", "switch": "on/off/auto"}


def config_page() -> str:
    """The text of docs/config.md."""
    parts = [CONFIG_HEAD]
    for table, cls in {**TABLES, "nodes": NodeConfig}.items():
        parts.append(f"\n## {'[[nodes]]' if table == 'nodes' else f'[{table}]'}\n")
        if table in ABOUT:
            parts.append(f"\n{ABOUT[table]}\n")
        parts.append("\n| key | type | default | meaning |\n|---|---|---|---|\n")
        for field in dataclasses.fields(cls):
            key: Key = keys_of(cls)[field.name]
            parts.append(f"| `{field.name}` | {_kind(key)} | {_default(key, field.default)} | {key.doc} |\n")
    return "".join(parts)


def _kind(key: Key) -> str:
    text = KINDS[key.kind]
    if key.choices and key.kind != "switch":
        return " ".join(f"`{choice}`" for choice in key.choices)
    if key.low is not None and key.high is not None:
        return f"{text}, {key.low:g} to {key.high:g}"
    return f"{text}, from {key.low:g}" if key.low else text


def _default(key: Key, value: Any) -> str:
    if key.required:
        return "required"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "empty" if value in ("", ()) else f"`{value}`"


def cli_page() -> str:
    """The text of docs/cli.md, at a width of 100 columns."""
    from typer.main import get_command

    from ..cli import app

    parts = [CLI_HEAD]
    _describe(get_command(app), "hydra", None, parts)
    return "".join(parts)


def _describe(command: Any, path: str, parent: Any, parts: list[str]) -> None:
    context = command.context_class(command, info_name=path.split()[-1], parent=parent,
                                    **{**command.context_settings, "terminal_width": 100, "max_content_width": 100})
    parts.append(f"\n## {path}\n\n```\n{command.get_help(context).rstrip()}\n```\n")
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            if not member.hidden:
                _describe(member, f"{path} {name}", context, parts)


def main() -> None:
    docs = Path(__file__).parent.parent.parent / "docs"
    (docs / "config.md").write_text(config_page(), encoding="utf-8")
    (docs / "cli.md").write_text(cli_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
