"""docs/images/*.svg: `hydra up`, `chat`, `ps` and `doctor` as they look, each taken from a real run on this box.

    .venv/bin/python build/screenshots.py [up] [chat] [ps] [doctor]

A peer and a head run on loopback with the model of the `demo` extra, from a hydra.toml in /tmp/hydra, so that no path
of whoever runs this is in a picture. Every program runs on a pseudo-terminal; what it wrote goes through a terminal
emulator, and what is then on its screen is drawn by rich. Nothing is written by hand.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from hydra.embedded import embedded_model  # noqa: E402
from tests.terminal_support import Terminal  # noqa: E402

FOLDER = Path("/tmp/hydra")
IMAGES = ROOT / "docs" / "images"
COLUMNS, ROWS = 96, 60
MODEL = "models/gemma-3-270m-q4_k_m.gguf"
PEER_PORT, API_PORT = 50052, 8080
TOML = """\
[model]
path = "{model}"
ctx_size = 2048
threads = 1
use_extra_bufts = false

[head]
api_port = {api_port}

[[nodes]]
name = "tower"
role = "head"
host = "127.0.0.1"
layers = 12
device = "CPU"

[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
port = {peer_port}
layers = 6
device = "CPU"
threads = 1
"""
# The model has learnt to continue texts, not to answer: these show it how an answer looks.
EXAMPLES = (
    ("Name three rivers of Asia.",
     "## Rivers of Asia\n\n1. **Yangtze**: the longest river of *Asia*, in China.\n2. **Mekong**: it flows through six "
     "countries.\n3. **Ganges**: a holy river of India.\n\nAll three rise in the *Himalaya* or on the plateau behind "
     "it."),
    ("How do I print a text three times in Python?",
     "Use a `for` loop:\n\n```python\nfor number in range(3):\n    print(\"Hello\")\n```\n\n"
     "The **body** of the loop runs three times."),
    ("Name three mountains of Africa.",
     "## Mountains of Africa\n\n1. **Kilimanjaro**: the highest, in Tanzania.\n2. **Mount Kenya**: an old volcano in "
     "Kenya.\n3. **Toubkal**: the highest of the *Atlas*, in Morocco.\n\nAll three are climbed by many people each "
     "year."),
    ("How do I multiply two numbers in Python?",
     "Use a **function** with two arguments:\n\n```python\ndef multiply(a, b):\n    return a * b\n```\n\n"
     "Call it with `multiply(2, 3)`: the result is 6."),
)
# pyte knows no faint text: it is shown in the colour that terminals give it.
FAINT = re.compile(r"\x1b\[2(;[0-9;]*)?m")
THEME = TerminalTheme(
    (24, 24, 27), (228, 228, 231),
    [(39, 39, 42), (248, 113, 113), (134, 239, 172), (253, 224, 71), (125, 175, 255), (216, 180, 254), (103, 232, 249),
     (212, 212, 216)],
    [(139, 139, 150), (252, 165, 165), (187, 247, 208), (254, 240, 138), (165, 200, 255), (233, 213, 255),
     (165, 243, 252), (250, 250, 250)])
# rich's own frame, without the fonts that it would have a reader's browser fetch.
FRAME = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<!-- Made by build/screenshots.py with Rich, https://www.textualize.io -->
<style>
.{unique_id}-matrix {{ font-family: "Fira Code", "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def screen_of(raw: str, columns: int, rows: int) -> list[Text]:
    """What a terminal shows after all that was written to it, without the empty lines at its end."""
    screen = pyte.Screen(columns, rows)
    pyte.Stream(screen).feed(FAINT.sub(lambda found: f"\x1b[90{found[1] or ''}m", raw))
    lines = [_line([screen.buffer[row][column] for column in range(columns)]) for row in range(rows)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


def _line(cells: list[pyte.screens.Char]) -> Text:
    text = Text()
    for style, run in itertools.groupby(cells, _style):
        text.append("".join(cell.data for cell in run), style)
    text.rstrip()
    return text


def _style(cell: pyte.screens.Char) -> Style:
    return Style(color=_color(cell.fg), bgcolor=_color(cell.bg), bold=cell.bold or None,
                 italic=cell.italics or None, underline=cell.underscore or None, reverse=cell.reverse or None)


def _color(name: str) -> str | None:
    """pyte's names of colours as rich's."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("bright", "bright_").replace("brown", "yellow").replace("bright_bright_", "bright_")


def svg_of(lines: list[Text], title: str, columns: int) -> str:
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor",
                      highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)
    return console.export_svg(title=title, theme=THEME, code_format=FRAME, unique_id=title.replace(" ", "-"))


def save(terminal: Terminal, title: str, *, until: str = "") -> None:
    """Draw what the terminal shows; up to the line that begins with `until`, where given."""
    lines = screen_of(terminal.raw, COLUMNS, ROWS)
    for number, line in enumerate(lines):
        if until and line.plain.startswith(until):
            lines = lines[:number]
            break
    text = svg_of(lines, title, COLUMNS)
    IMAGES.mkdir(parents=True, exist_ok=True)
    target = IMAGES / f"{title.removeprefix('hydra ')}.svg"
    target.write_text(text, encoding="utf-8")
    print(*(line.plain for line in lines), sep="\n")
    print(f"{target.relative_to(ROOT)}: {len(text.encode()) / 1000:.0f} kB")


def port(wanted: int) -> int:
    """The usual port, or a free one where that is taken."""
    for number in (wanted, 0):
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", number))
            except OSError:
                continue
            return int(trial.getsockname()[1])
    raise OSError("no port is free")


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(arguments, COLUMNS, FOLDER, ROWS, python=str(FOLDER / ".venv" / "bin" / "python"),
                      PYTHONPATH=str(FOLDER))
    try:
        yield opened
    finally:
        if opened.child.isalive():
            opened.send("\x03")
        opened.end()
        opened.close()


def up(tower: Terminal) -> None:
    save(tower, "hydra up")


def chat(tower: Terminal) -> None:
    turns = [{"role": role, "content": text} for pair in EXAMPLES
             for role, text in zip(("user", "assistant"), pair, strict=True)]
    saved = {"system": "", "params": {"temperature": 0, "max_tokens": 120}, "messages": turns}
    (FOLDER / "examples.json").write_text(json.dumps(saved))
    with terminal("chat") as talk:
        talk.until(">>>")
        talk.send("/load examples.json\r")
        talk.until("Loaded")
        answer(talk, "How do I add two numbers in Python?")
        talk.send("/set repeat_penalty 1.1\r")
        talk.until("= 1.1")
        answer(talk, "Name three cities of Italy.")
        save(talk, "hydra chat")
        talk.send("\x04")


def answer(talk: Terminal, question: str) -> None:
    """Ask, and wait until the next question can be asked."""
    before = talk.all().count("context ")
    talk.send(f"{question}\r")
    talk.wait_for(lambda: talk.all().count("context ") > before and talk.text().endswith(">>>"), "an answer")


def ps(tower: Terminal) -> None:
    """While a request runs."""
    serving = re.search(r"http://127\.0\.0\.1:\d+/v1", tower.raw)
    assert serving, "the head has said where it serves"
    request = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{serving[0]}/completions", json=request, timeout=60, trust_env=False) as reply:
        lines = reply.raise_for_status().iter_lines()
        begun = list(itertools.islice(lines, 100))
        assert len(begun) == 100, f"the answer has ended: {begun[-4:]}"
        with terminal("ps") as shown:
            shown.end()
            save(shown, "hydra ps")


def doctor(tower: Terminal) -> None:
    with terminal("doctor", "--node", "tower") as shown:
        shown.end()
        save(shown, "hydra doctor")


PICTURES: dict[str, Callable[[Terminal], None]] = {"up": up, "chat": chat, "ps": ps, "doctor": doctor}


def environment() -> None:
    """This environment once more, in the folder: so that what programs say of themselves is there too."""
    packages = Path(sysconfig.get_path("purelib"))
    prefix = FOLDER / ".venv"
    here = prefix / packages.relative_to(sys.prefix)
    here.mkdir(parents=True)
    for entry in packages.iterdir():
        if entry.name == "llama_cpp":  # the system tells where a library really lies
            shutil.copytree(entry, here / entry.name)
        else:
            (here / entry.name).symlink_to(entry)
    (prefix / "bin").symlink_to(Path(sys.prefix) / "bin")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", prefix)
    (FOLDER / "hydra").symlink_to(ROOT / "hydra")


def main(names: list[str]) -> None:
    """All pictures, or those named."""
    FOLDER.mkdir(mode=0o755)  # not there before: what lies there is not ours
    try:
        (FOLDER / "models").mkdir()
        (FOLDER / MODEL).symlink_to(embedded_model().path)
        environment()
        (FOLDER / "hydra.toml").write_text(TOML.format(model=MODEL, api_port=port(API_PORT), peer_port=port(PEER_PORT)))
        with terminal("up", "--node", "mini") as mini, terminal("up", "--node", "tower") as tower:
            mini.until("mini")
            tower.until("curl")
            for name in names or list(PICTURES):
                tower.take()
                mini.take(0.0)
                PICTURES[name](tower)
    finally:
        shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main(sys.argv[1:])
