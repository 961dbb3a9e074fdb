"""Reads hydra.toml, the HYDRA_* environment and command-line overrides into one frozen, checked Config.

Knows nothing of models, devices or the network: what can be said from the text alone is said here, once, as a
ConfigError that names the key, its line and the mend. hydra/keys.py holds the keys. Precedence: command line >
environment > file > default; Config.origins remembers which one won for each key.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import ipaddress
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .keys import (
    TABLES,
    HeadConfig,
    Key,
    LinkConfig,
    ModelConfig,
    MtpConfig,
    NodeConfig,
    PeerConfig,
    SecurityConfig,
    keys_of,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Config", "HeadConfig", "LinkConfig", "ModelConfig", "MtpConfig", "NodeConfig", "PeerConfig",
           "SecurityConfig", "check_split", "find", "load"]

# Variables of hydra that are not keys of the file.
OTHER_VARIABLES = ("HYDRA_CONFIG", "HYDRA_NODE", "HYDRA_API", "HYDRA_API_KEY", "HYDRA_DEBUG", "HYDRA_LOG_FORMAT")
DEFAULT = "default"


@dataclass(frozen=True)
class Config:
    """The whole configuration, as one box understood it."""

    model: ModelConfig
    mtp: MtpConfig
    head: HeadConfig
    peer: PeerConfig
    security: SecurityConfig
    link: LinkConfig
    nodes: tuple[NodeConfig, ...]
    path: Path
    origins: Mapping[str, str]
    """`model.ctx_size`, `nodes.mini.layers` … → `default`, `hydra.toml line 4`, `HYDRA_…` or `command line`."""

    @property
    def head_node(self) -> NodeConfig:
        return next(node for node in self.nodes if node.role == "head")

    @property
    def peers(self) -> tuple[NodeConfig, ...]:
        return tuple(node for node in self.nodes if node.role == "peer")

    def node(self, name: str) -> NodeConfig:
        """The node of that name. Raises ConfigError naming those there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        names = [node.name for node in self.nodes]
        raise ConfigError(f"There is no node {name!r} in {self.path}.",
                          _suggest(name, names) or f"Its nodes are: {', '.join(names)}.")

    def values(self, *, secrets: bool = False) -> dict[str, Any]:
        """Every key and its value, flat, in order; secrets are masked unless asked for."""
        flat: dict[str, Any] = {}
        for table, cls in TABLES.items():
            for name, key in keys_of(cls).items():
                value = getattr(getattr(self, table), name)
                flat[f"{table}.{name}"] = "********" if key.secret and value and not secrets else value
        for node in self.nodes:
            for name in keys_of(NodeConfig):
                flat[f"nodes.{node.name}.{name}"] = getattr(node, name)
        return flat

    def digest(self) -> str:
        """Sixteen hex digits, equal on two boxes when they agree on all that both must agree on.

        Paths and secrets are left out: the first rightly differ, the second must not be given away by their hash.
        """
        shared: dict[str, Any] = {}
        for table, cls in TABLES.items():
            for name, key in keys_of(cls).items():
                if not key.local and not key.secret:
                    shared[f"{table}.{name}"] = getattr(getattr(self, table), name)
        shared["nodes"] = sorted((dataclasses.asdict(node) for node in self.nodes), key=lambda n: str(n["name"]))
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


def find(explicit: str | Path | None = None, env: Mapping[str, str] | None = None) -> Path:
    """Where hydra.toml is: the one named, HYDRA_CONFIG, the working directory, ~/.config/hydra, /etc/hydra.

    Raises: ConfigError listing the places looked at.
    """
    env = os.environ if env is None else env
    named = explicit or env.get("HYDRA_CONFIG")
    if named:
        return Path(named).expanduser()
    places = [Path("hydra.toml"), Path("~/.config/hydra/hydra.toml").expanduser(), Path("/etc/hydra/hydra.toml")]
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(f"There is no hydra.toml (looked at {', '.join(map(str, places))}).",
                      "Copy hydra.toml.example to hydra.toml and edit it, or name one with --config FILE.")


def load(path: str | Path | None = None, env: Mapping[str, str] | None = None,
         overrides: Mapping[str, Any] | None = None) -> Config:
    """Read, merge and check everything.

    path: the file, or None to look for it (see `find`). env: os.environ unless given.
    overrides: values of the command line by dotted key (`model.ctx_size`, `nodes.mini.layers`); None = not given.
    Raises: ConfigError for the first fault found.
    """
    env = os.environ if env is None else env
    file = find(path, env)
    reader = _Reader(file, env, {k: v for k, v in (overrides or {}).items() if v is not None})
    return reader.config()


def check_split(config: Config, n_layer: int, n_nextn: int = 0) -> dict[str, int]:
    """The layers of each node, by name, once the model is known. One `auto` takes what the others leave.

    n_layer: the model's layers without its MTP blocks; n_nextn: its MTP blocks. These always live on the head, and the
    head's number may count them (llama.cpp's users do: 25 + 40 for 64 layers and 1 block) or not. What is returned
    does not, and adds up to n_layer.
    Raises: ConfigError naming the numbers, where they cannot add up or two nodes are left to `auto`.
    """
    given = {node.name: node.layers for node in config.nodes if node.layers != "auto"}
    auto = [node.name for node in config.nodes if node.layers == "auto"]
    total = sum(int(layers) for layers in given.values())
    told = " + ".join(f"{layers} on {name}" for name, layers in given.items())
    where = "; ".join(f"{name}: {config.origins[f'nodes.{name}.layers']}" for name in given)
    if len(auto) > 1:
        raise ConfigError(f"layers is auto on {' and '.join(auto)}: there is no single rest to give to one of them.",
                          f"Write the number of layers for all nodes but one; the model has {n_layer}.")
    split = {node.name: int(given.get(node.name, 0)) for node in config.nodes}
    head = config.head_node.name
    if auto:
        if total > n_layer:
            raise ConfigError(f"The split has more layers than the model: {told} = {total}, the model has {n_layer} "
                              f"({where}).",
                              f"Lower them to at most {n_layer} together; {auto[0]} is auto and takes the rest.")
        split[auto[0]] = n_layer - total
    elif n_nextn and total == n_layer + n_nextn and split[head] >= n_nextn:
        split[head] -= n_nextn
    elif total != n_layer:
        blocks = f" (or {n_layer + n_nextn} with its MTP block, counted on {head})" if n_nextn else ""
        off = n_layer - total
        mend = f"{abs(off)} too {'few' if off > 0 else 'many'}"
        raise ConfigError(f"The split does not add up: {told} = {total}, the model has {n_layer} layers{blocks} "
                          f"({where}).", f"{mend}: change one of the numbers, or write layers = \"auto\" on one node.")
    return split


class _Reader:
    """One reading of one file; holds what is needed to say where a fault is."""

    def __init__(self, file: Path, env: Mapping[str, str], overrides: dict[str, Any]) -> None:
        self.file = file
        self.env = env
        self.overrides = overrides
        self.origins: dict[str, str] = {}
        try:
            self.text = file.read_bytes().decode("utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{file} does not exist.",
                              "Copy hydra.toml.example there, or name another with --config FILE.") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}).", "Save it as UTF-8.") from error
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}.",
                              "Check the path and its permissions.") from error
        try:
            self.data = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file} is not valid TOML: {error}.",
                              "Text values need quotes, tables look like [model] and [[nodes]].") from error
        self.lines = _key_lines(self.text)

    def config(self) -> Config:
        known = [*TABLES, "nodes"]
        for table in self.data:
            if table not in known:
                raise self._fault((table,), f"{_bracket(table, self.data[table])} is not a table of hydra.toml",
                                  _suggest(table, known) or f"The tables are: {', '.join(known)}.")
        built: dict[str, Any] = {}
        for table, cls in TABLES.items():
            value = self.data.get(table, {})
            if not isinstance(value, dict):
                raise self._fault((table,), f"{table} must be a table, not {_kind_name(value)}",
                                  f"Write [{table}] and its keys below it.")
            built[table] = self._table(cls, value, (table,), table, f"[{table}]", f"HYDRA_{table.upper()}_")
        nodes = self._nodes()
        self._check_leftovers(nodes)
        config = Config(nodes=nodes, path=self.file, origins=self.origins, **built)
        self._check_addresses(config)
        self._check_whole(config)
        return config

    # ---- one table -----------------------------------------------------------------------------------------------

    def _table(self, cls: type, given: dict[str, Any], at: tuple[Any, ...], dotted: str, shown: str,
               prefix: str) -> Any:
        keys = keys_of(cls)
        for name in given:
            if name not in keys:
                raise self._fault((*at, name), f"{shown} has no key {name!r}",
                                  _suggest(name, keys) or f"Its keys are: {', '.join(keys)}.")
        values: dict[str, Any] = {}
        for name, key in keys.items():
            variable, full = prefix + name.upper(), f"{dotted}.{name}"
            if full in self.overrides:
                origin, raw, where = "command line", self.overrides[full], f"command line: {full}"
            elif variable in self.env and name != "name":
                origin, raw, where = variable, self.env[variable], f"environment: {variable}"
            elif name in given:
                line = self._line((*at, name))
                origin = f"{self.file.name} line {line}" if line else self.file.name
                raw, where = given[name], f"{self._place((*at, name))}: {shown} {name}"
            elif key.required:
                raise self._fault(at, f"{shown} lacks the key {name!r}", f"Add {name} = … : {key.doc}")
            else:
                self.origins[full] = DEFAULT
                if key.kind == "path":
                    values[name] = self._path(str(getattr(cls, name)))
                continue
            text = origin in ("command line", variable) and isinstance(raw, str)
            values[name] = self._value(_parse(raw, key) if text else raw, key, where)
            self.origins[full] = origin
        return cls(**values)

    def _value(self, raw: Any, key: Key, where: str) -> Any:
        """`raw` as the type of its key. Raises ConfigError naming `where`, what was found and what is wanted."""
        def refuse(wanted: str, hint: str = "") -> ConfigError:
            found = f"{raw!r}" if isinstance(raw, (str, int, float)) and not isinstance(raw, bool) else _kind_name(raw)
            return ConfigError(f"{where} must be {wanted}, not {found}.", hint or key.doc)

        value: Any = raw
        if key.kind == "switch":
            value = {True: "on", False: "off"}.get(raw, raw) if isinstance(raw, bool) else raw
        if key.kind == "layers" and value == "auto":
            return value
        if key.kind in ("int", "layers"):
            if not isinstance(value, int) or isinstance(value, bool):
                raise refuse('a whole number or "auto"' if key.kind == "layers" else "a whole number")
        elif key.kind == "float":
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
                raise refuse("a number")
            value = float(value)
        elif key.kind == "bool":
            if not isinstance(value, bool):
                raise refuse("true or false")
        elif key.kind == "list":
            if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
                raise refuse("a list of texts")
            value = tuple(value)
        elif not isinstance(value, str):
            raise refuse("a text in quotes")
        if key.required and value == "":
            raise refuse("given")
        if key.kind == "path":
            return self._path(value)
        if key.choices and value not in key.choices:
            raise refuse(f"one of {', '.join(key.choices)}", _suggest(str(value), key.choices))
        if key.low is not None and value < key.low:
            raise refuse(f"at least {key.low:g}")
        if key.high is not None and value > key.high:
            raise refuse(f"at most {key.high:g}")
        return value

    def _path(self, value: str) -> str:
        """~ is the home; a relative path counts from the file that names it, not from where the command was typed."""
        if not value:
            return ""
        return str(self.file.absolute().parent / Path(value).expanduser())

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def _nodes(self) -> tuple[NodeConfig, ...]:
        listed = self.data.get("nodes", [])
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise self._fault(("nodes",), "nodes must be a list of tables", "Write one [[nodes]] for each box.")
        if not listed:
            raise ConfigError(f"{self.file} has no nodes.",
                              "Write one [[nodes]] for each box, one of them with role = \"head\".")
        nodes: list[NodeConfig] = []
        for index, given in enumerate(listed):
            name = given.get("name")
            label = name if isinstance(name, str) and name else str(index + 1)
            if isinstance(name, str) and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise self._fault(("nodes", index, "name"), f"[[nodes]] name {name!r} is not a usable name",
                                  "Letters, digits, - and _ only.")
            for other, earlier in enumerate(nodes):
                if earlier.name == name:
                    raise self._fault(("nodes", index, "name"), f"Two nodes have the name {name!r} "
                                      f"(the other: {self._place(('nodes', other, 'name'))})",
                                      "Give each box a name of its own.")
            prefix = f"HYDRA_NODES_{_env_name(label)}_"
            node = self._table(NodeConfig, given, ("nodes", index), f"nodes.{label}", f"[[nodes]] {label}:", prefix)
            self._check_host(node, index)
            nodes.append(node)
        heads = [node.name for node in nodes if node.role == "head"]
        if not heads:
            raise ConfigError(f"{self.file}: no node has role = \"head\" (nodes: {', '.join(n.name for n in nodes)}).",
                              "Give the box that loads the model role = \"head\".")
        if len(heads) > 1:
            index = [n.name for n in nodes].index(heads[1])
            raise self._fault(("nodes", index, "role"), f"Two nodes have role = \"head\": {' and '.join(heads)}",
                              "Only one box loads the model; make the others \"peer\".")
        return tuple(nodes)

    def _check_host(self, node: NodeConfig, index: int) -> None:
        host = node.host
        fault = None
        if "/" in host or " " in host:
            fault, mend = "is not an address", "Write the address or host name alone, without http:// or spaces."
        elif host.startswith("[") or (host.count(":") == 1):
            fault, mend = "has a port in it", "Write the port in its own key: port = 50052."
        elif host in ("0.0.0.0", "::"):
            fault = "is not the address of a box"
            mend = "Write the address by which the other box reaches it; to listen everywhere, bind = \"0.0.0.0\"."
        if fault:
            raise self._fault(("nodes", index, "host"), f"[[nodes]] {node.name}: host {host!r} {fault}", mend)
        for which in ("port", "bind"):
            if node.role == "head" and which in self.data["nodes"][index]:
                raise self._fault(("nodes", index, which),
                                  f"[[nodes]] {node.name}: {which} is a key of peers, and this node is the head",
                                  "The head's API is set by [head] api_host and api_port.")

    def _check_addresses(self, config: Config) -> None:
        seen: dict[tuple[str, int], str] = {}
        names = [node.name for node in config.nodes]
        head_hosts = {config.head.api_host}
        if config.head.api_host in ("0.0.0.0", "::"):
            head_hosts.add(config.head_node.host)
        for host in head_hosts:
            seen[_same_host(host), config.head.api_port] = f"the API of {config.head_node.name} ([head] api_port)"
        for node in config.peers:
            address = (_same_host(node.host), node.port)
            if address in seen:
                raise self._fault(("nodes", names.index(node.name), "port"),
                                  f"{node.endpoint} is used twice: by node {node.name} and by {seen[address]}",
                                  "Give one of them another host or port.")
            seen[address] = f"node {node.name}"
        for entry in config.peer.allow:
            try:
                ipaddress.ip_address(entry)
            except ValueError:
                raise self._fault(("peer", "allow"), f"[peer] allow has {entry!r}, which is no IP address",
                                  "Write addresses such as 192.168.1.20, one by one.") from None

    def _check_whole(self, config: Config) -> None:
        model = config.model
        if model.ubatch_size > model.batch_size:
            raise self._clash("ubatch_size", "batch_size",
                              f"[model] ubatch_size {model.ubatch_size} is larger than batch_size {model.batch_size}",
                              "Lower ubatch_size or raise batch_size.")
        if model.flash_attn == "off" and model.cache_type_v not in ("f32", "f16", "bf16"):
            raise self._clash("cache_type_v", "flash_attn",
                              f"[model] cache_type_v = {model.cache_type_v!r} needs flash attention, which is off",
                              "Set flash_attn = \"on\" or cache_type_v = \"f16\".")

    def _clash(self, one: str, other: str, message: str, hint: str) -> ConfigError:
        """Two keys of [model] that contradict each other: where the one stands that is not the file's, if any."""
        for name in (one, other):
            origin = self.origins[f"model.{name}"]
            if origin == "command line" or origin.startswith("HYDRA_"):
                return ConfigError(f"{origin}: {message}.", hint)
        return self._fault(("model", one), message, hint)

    def _check_leftovers(self, nodes: tuple[NodeConfig, ...]) -> None:
        """Overrides and HYDRA_* variables that name no key: a misspelt one must not be ignored in silence."""
        dotted = [f"{table}.{name}" for table, cls in TABLES.items() for name in keys_of(cls)]
        dotted += [f"nodes.{node.name}.{name}" for node in nodes for name in keys_of(NodeConfig)]
        for name in self.overrides:
            if name not in dotted:
                raise ConfigError(f"command line: there is no key {name!r}.", _suggest(name, dotted))
        variables = ["HYDRA_" + name.replace(".", "_").upper() for name in dotted if not name.startswith("nodes.")]
        variables += [f"HYDRA_NODES_{_env_name(node.name)}_{name.upper()}" for node in nodes
                      for name in keys_of(NodeConfig) if name != "name"]
        ours = tuple(f"HYDRA_{table.upper()}_" for table in [*TABLES, "nodes"])
        for variable in self.env:
            if not variable.startswith("HYDRA_") or variable in variables or variable in OTHER_VARIABLES:
                continue
            # Other programs use HYDRA_ as well: one that resembles none of our names is left alone.
            close = difflib.get_close_matches(variable, [*variables, *OTHER_VARIABLES], 1, 0.85)
            if variable.startswith(ours) or close:
                raise ConfigError(f"environment: {variable} names no key of hydra.toml.",
                                  _suggest(variable, variables) or "`hydra config show` lists the keys; unset it.")

    # ---- where a fault is ------------------------------------------------------------------------------------------

    def _line(self, at: tuple[Any, ...]) -> int:
        """The line of a key, or of the closest table around it; 0 where there is none."""
        while at:
            if at in self.lines:
                return self.lines[at]
            at = at[:-1]
        return 0

    def _place(self, at: tuple[Any, ...]) -> str:
        line = self._line(at)
        return f"{self.file} line {line}" if line else str(self.file)

    def _fault(self, at: tuple[Any, ...], message: str, hint: str) -> ConfigError:
        return ConfigError(f"{self._place(at)}: {message}.", hint)


_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_ASSIGN = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")


def _key_lines(text: str) -> dict[tuple[Any, ...], int]:
    """Where each key stands: ("model", "path") → 3, ("nodes", 1, "host") → 20. tomllib does not say, so look ourselves.

    Good for files as people write them; a key inside an inline table gets the line of the table.
    """
    lines: dict[tuple[Any, ...], int] = {}
    table: tuple[Any, ...] = ()
    count: dict[str, int] = {}
    quote = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:  # inside a multi-line text
            if quote in line:
                quote = ""
            continue
        if header := _HEADER.match(line):
            parts = _parts(header[2])
            if header[1] == "[[":
                index = count[header[2]] = count.get(header[2], -1) + 1
                table = (*parts, index)
                lines.setdefault(parts, number)
            else:
                table = parts
            lines.setdefault(table, number)
        elif key := _ASSIGN.match(line):
            parts = _parts(key[1])
            for end in range(1, len(parts) + 1):
                lines.setdefault((*table, *parts[:end]), number)
            for mark in ('"""', "'''"):
                if line.count(mark) % 2:
                    quote = mark
    return lines


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _parse(raw: str, key: Key) -> Any:
    """A text from the environment or the command line as the type of its key; what cannot be is left for the check."""
    text = raw.strip()
    if key.kind in ("int", "layers") and re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if key.kind == "float":
        try:
            return float(text)
        except ValueError:
            return raw
    if key.kind in ("bool", "switch"):
        lowered = text.lower()
        if key.kind == "bool" and lowered in ("true", "1", "yes", "on"):
            return True
        if key.kind == "bool" and lowered in ("false", "0", "no", "off"):
            return False
        return {"true": "on", "1": "on", "yes": "on", "false": "off", "0": "off", "no": "off"}.get(lowered, lowered)
    if key.kind == "list":
        return [item.strip() for item in text.split(",") if item.strip()]
    return raw


def _suggest(word: str, words: Any) -> str:
    close = difflib.get_close_matches(word, list(words), 1, 0.5)
    return f" Did you mean {close[0]}?".strip() if close else ""


def _env_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def _same_host(host: str) -> str:
    """localhost and 127.0.0.1 are one place; names are compared without regard to case."""
    return "127.0.0.1" if host.lower() in ("localhost", "::1") else host.lower()


def _bracket(table: str, value: Any) -> str:
    return f"[{table}]" if isinstance(value, dict) else f"[[{table}]]" if isinstance(value, list) else table


def _kind_name(value: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a table"}
    if isinstance(value, bool):
        return "true" if value else "false"
    return names.get(type(value), type(value).__name__)
