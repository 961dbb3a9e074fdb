"""`hydra init`: a hydra.toml for two boxes, from a few answers or flags and from what this box has.

The text is hydra.toml.example with its values exchanged, so that every key and its comment is there. Knows nothing of
llama.cpp: the card's name and memory come from the driver.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import config, console, nodes
from ..errors import ConfigError

YES = ("y", "yes")
ROLES = ("head", "peer")
CTX_SIZE = 16384  # the example's is the reference rig's; this fits most


@dataclass
class Answers:
    """What has to be known; empty = not yet."""

    model: str = ""
    head: str = ""
    peer: str = ""
    role: str = ""


def run(output: str, answers: Answers, *, force: bool, ask: Callable[[str, str], str] | None = None) -> None:
    """Write the file. ask: (question, default) → answer, from a terminal; None = flags only.

    Raises: ConfigError where a needed answer is missing or the file exists and may not be overwritten.
    """
    target = Path(output).expanduser()
    if target.exists() and not force and not (ask and ask(f"{target} exists. Overwrite it?", "no").lower() in YES):
        raise ConfigError(f"{target} exists already.", "Name another with --output, or overwrite it with --force.")
    card = this_card()
    if ask:
        console.note(f"This box: {f'{card[0]}, {card[1]:.1f} GiB' if card else 'no GPU that its driver tells of'}.")
    complete(answers, ask)
    text = render(answers, card)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        config.load(scratch, {})  # whatever was answered, the file that is left must be usable
        scratch.replace(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}.",
                          "Name another place with --output.") from error
    except ConfigError as error:
        raise ConfigError(error.message.replace(str(scratch), "The file would not be usable"), error.hint) from error
    finally:
        scratch.unlink(missing_ok=True)
    console.note(f"Wrote {target}. Copy it to the other box, then run `hydra config check` and `hydra up` on both.")


def complete(answers: Answers, ask: Callable[[str, str], str] | None) -> None:
    """Ask for what no flag gave. Raises: ConfigError naming the flag where nobody can be asked."""
    own = own_address()
    if not answers.role:
        question = "Is this box the head (it has the model) or the peer?"
        answers.role = ask(question, "head").lower() if ask else "head"
        while ask and answers.role not in ROLES:
            answers.role = ask("Write head or peer", "head").lower()
    if answers.role not in ROLES:
        raise ConfigError(f"The role {answers.role!r} is not known.", "It is head or peer.")
    here, there = ("head", "peer") if answers.role == "head" else ("peer", "head")
    if not getattr(answers, here):
        setattr(answers, here, ask("Address of this box", own) if ask else own)
    for name, question in ((there, f"Address or host name of the {there} box"), ("model", "GGUF file on the head box")):
        if not getattr(answers, name):
            setattr(answers, name, ask(question, "") if ask else "")
        if not getattr(answers, name):
            what = name if name == "model" else f"address of the {name}"
            raise ConfigError(f"The {what} is not given.", f"Add --{name} …")


def render(answers: Answers, card: tuple[str, float] | None) -> str:
    """The example with these answers. card: name and GiB of this box's GPU; of the other box nothing is known yet."""
    before, head, peer = example().split("\n[[nodes]]\n")
    before = _set(_set(before, "path", json.dumps(answers.model)), "ctx_size", str(CTX_SIZE))
    intro = "# hydra.toml, made by `hydra init`: one file for all boxes, copied to each.\n"
    before = f"{intro}\n{before.partition(chr(10) * 2)[2]}"
    tables = []
    for role, host, text in (("head", answers.head, head), ("peer", answers.peer, peer)):
        text = _set(text, "name", json.dumps(role))
        text = _set(text, "host", json.dumps(host))
        text = _set(text, "layers", '"auto"')
        known = card if role == answers.role else None
        text = _set(text, "device", '"auto"')
        text = _set(text, "gpu", json.dumps(known[0]) if known else None)
        text = _set(text, "memory_gib", f"{known[1]:.1f}" if known else None)
        tables.append(text)
    return "\n[[nodes]]\n".join([before, *tables])


def _set(text: str, key: str, value: str | None) -> str:
    """Exchange the value of `key`, keeping its comment; None comments the line out."""
    if value is None:
        return re.sub(rf"(?m)^{key} = ", f"# {key} = ", text, count=1)
    return re.sub(rf'(?m)^{key} = ("[^"]*"|\S+)', lambda _: f"{key} = {value}", text, count=1)


def example() -> str:
    """hydra.toml.example: beside the package in a checkout, inside it when installed or frozen."""
    package = Path(__file__).parent.parent
    for place in (package / "hydra.toml.example", package.parent / "hydra.toml.example"):
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise ConfigError("hydra.toml.example is missing from this installation.", "Install hydra again.")


def own_address() -> str:
    """The address by which this box reaches others, or its host name where it reaches none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # UDP: nothing is sent, only the route is looked up
            address = str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
    return address if address in nodes.this_box().addresses else socket.gethostname()


def this_card() -> tuple[str, float] | None:
    """Name and GiB of this box's first GPU; None where it has none that the driver tells."""
    from ..hardware import local_devices

    device = local_devices()[0]
    if device["name"] == "CPU":
        return None
    name = str(device["name"]).removeprefix("NVIDIA ").removeprefix("GeForce ")
    return name, round(device["memory_total"] / 2**30, 1)


def ask_at_terminal(question: str, default: str) -> str:
    """A question on stderr and its answer from stdin."""
    console.write_note(f"{question}{f' [{default}]' if default else ''}: ")
    return sys.stdin.readline().strip() or default
