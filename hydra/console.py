"""The only place that draws on a terminal: log lines, progress, tables, errors.

Knows nothing of what it shows. Results go to stdout, everything else to stderr; colour and bars only where the stream
is a terminal (rich honours NO_COLOR, TERM=dumb and COLUMNS). rich is imported when something is drawn, so that
`hydra --help` stays quick.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

NARROW = 60  # columns
RESIZE_S = 0.2  # how soon a screen follows its window
LINE_EVERY_S = 2.0  # progress where there is no terminal: a line at most this often


@lru_cache(maxsize=1)
def err() -> Console:
    """The console on stderr; one for the process, so that log lines do not tear a bar."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False)


@lru_cache(maxsize=1)
def out() -> Console:
    """The console on stdout."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def result(text: str) -> None:
    """One line of a command's result, on stdout as it is."""
    print(text, flush=True)


def result_json(value: Mapping[str, Any]) -> None:
    """The one JSON object of `--json`, on a line of its own."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def write(text: str) -> None:
    """A piece of an answer as it streams, on stdout."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_note(text: str) -> None:
    """The same on stderr, where stdout is for a report."""
    sys.stderr.write(text)
    sys.stderr.flush()


def write_dim(text: str) -> None:
    """A piece of reasoning, dimmed, on stderr."""
    err().print(text, style="dim", end="", soft_wrap=True)


def note(text: str) -> None:
    """One line for the person at the terminal, on stderr."""
    if _in_json():
        logging.getLogger("hydra").info("%s", text)
        return
    err().print(text, soft_wrap=_unbroken())


def _unbroken() -> bool:
    """Lines are wrapped at words on a terminal, and left whole in a file or pipe."""
    return not err().is_terminal


def error(message: str, hint: str = "", trace: BaseException | None = None) -> None:
    """What happened, and on a line of its own what to do; where asked, where it comes from. In a JSON log a record."""
    one = " ".join(message.split())
    if _in_json():
        logging.getLogger("hydra").error("%s", one, exc_info=trace, extra={"hint": " ".join(hint.split())})
        return
    if trace is not None:
        import traceback

        traceback.print_exception(trace)
    from rich.text import Text

    err().print(Text.assemble(("error: ", "bold red"), one), soft_wrap=_unbroken())
    if hint:
        err().print(Text.assemble(("hint:  ", "bold"), " ".join(hint.split())), soft_wrap=_unbroken())


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, stderr: bool = False) -> None:
    """A left-aligned table without borders; cells fold where the terminal is narrow, and never in a pipe."""
    from rich.table import Table
    from rich.text import Text

    console = err() if stderr else out()
    if stderr and _in_json():
        for line in text_table(columns, rows):
            note(line)
        return
    if not console.is_terminal:
        for line in text_table(columns, rows):
            print(line, file=sys.stderr if stderr else sys.stdout, flush=True)
        return
    drawn = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*[Text(str(cell)) for cell in row])
    console.print(drawn)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The same as lines of text, as wide as they get; the first is the header."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(cell_row[index]) for cell_row in cells) for index in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cell_row, widths, strict=True)).rstrip()
            for cell_row in cells]


Line = tuple[str, str]  # text and style


def width() -> int | None:
    """Columns of the terminal on stdout; None where there is none, and lines are left whole."""
    return out().width if out().is_terminal else None


def print_lines(lines: Sequence[Line]) -> None:
    """Lines with a style each, on stdout; wrapped at words on a terminal."""
    for text, style in lines:
        out().print(text, style=style or None, soft_wrap=not out().is_terminal)


def heading(text: str) -> None:
    """The title of a group of results, on stdout."""
    out().print(text, style="bold")


def marked(mark: str, style: str, text: str) -> None:
    """A result behind a short mark, on stdout: wrapped under itself on a terminal, one line in a pipe."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if not out().is_terminal:
        print(f"  {mark:<4} {text}", flush=True)
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=4, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(mark, style=style), Text(text))
    out().print(Padding(grid, (0, 0, 0, 2)))


def block(rows: Sequence[tuple[str, str]], line: str) -> None:
    """A few named facts for the person at the terminal, on stderr, and below them a line to be copied: only the
    terminal itself breaks that."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, fact in rows:
        grid.add_row(f"  {name}", Text(fact))
    err().print(grid)
    err().print(line, soft_wrap=True)


def clipboard(text: str) -> None:
    """Give text to the terminal's clipboard (OSC 52); terminals that do not allow it ignore it."""
    if err().is_terminal:
        import base64

        write_note(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")


class Screen:
    """A screen of its own on the terminal, drawn anew without flicker, until q or Ctrl-C; then all is as it was before.

    `left`: whether q was typed. Typed keys are not shown, and Ctrl-C and Ctrl-Z keep their meaning.
    """

    def __init__(self) -> None:
        self.left = False
        self._live: Any = None
        self._saved: Any = None
        self._last: Callable[[int], Sequence[Line]] = lambda _columns: ()

    def show(self, lines: Callable[[int], Sequence[Line]]) -> None:
        """Draw what `lines` gives for so many columns, here and whenever the window changes its size."""
        from rich.console import Group
        from rich.text import Text

        self._last = lines
        self._live.update(Group(*[Text(text, style) for text, style in lines(out().width)]), refresh=True)

    def wait(self, seconds: float) -> None:
        """Until then, or until q."""
        import select

        end, size = time.monotonic() + seconds, out().size
        while not self.left and (rest := end - time.monotonic()) > 0:
            if out().size != size:
                size = out().size
                self.show(self._last)
            if self._saved is None:
                time.sleep(min(rest, RESIZE_S))
            elif select.select([sys.stdin], [], [], min(rest, RESIZE_S))[0]:
                keys = os.read(sys.stdin.fileno(), 64)
                self.left = not keys or b"q" in keys.lower()

    def __enter__(self) -> Screen:
        import termios
        import tty

        from rich.live import Live

        if sys.stdin is not None and sys.stdin.isatty():
            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        self._live = Live(console=out(), screen=True, auto_refresh=False)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        import termios

        self._live.stop()
        if self._saved is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)


class Status:
    """One line on stderr that says what is being done just now; nothing where there is no terminal."""

    def __init__(self) -> None:
        self._status: Any = None

    def update(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{text} …")

    def __enter__(self) -> Status:
        if err().is_terminal:
            self._status = err().status("")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


# ---- log -----------------------------------------------------------------------------------------------------------

LEVELS = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}


class _Handler(logging.Handler):
    """level, time, node, message; or one JSON object a line."""

    def __init__(self, node: str, as_json: bool) -> None:
        super().__init__()
        self.node = node
        self.as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = " ".join(record.getMessage().split())
            node = getattr(record, "node", self.node)
            if self.as_json:
                stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
                told = {"level": record.levelname.lower(), "time": stamp, "node": node, "logger": record.name,
                        "message": message}
                if getattr(record, "hint", ""):
                    told["hint"] = record.hint  # type: ignore[attr-defined]
                if record.exc_info:
                    told["exception"] = logging.Formatter().formatException(record.exc_info)
                print(json.dumps(told, ensure_ascii=False), file=sys.stderr, flush=True)
            else:
                from rich.text import Text

                stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
                line = Text.assemble((f"{record.levelname.lower():<7}", LEVELS.get(record.levelname, "")), f" {stamp} ",
                                     (node, "bold"), f" {message}")
                err().print(line, soft_wrap=_unbroken())
            if record.exc_info and not self.as_json:
                print(logging.Formatter().formatException(record.exc_info), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _in_json() -> bool:
    """Whether stderr is a log of JSON objects, where a line of another kind would be a fault to whoever reads it."""
    return any(isinstance(handler, _Handler) and handler.as_json for handler in logging.getLogger().handlers)


def log_to_stderr(node: str, *, debug: bool = False, as_json: bool = False) -> None:
    """Send the log of this process to stderr. Replaces what an earlier call set up."""
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    root.addHandler(_Handler(node, as_json))
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    for chatty in ("httpx", "httpcore", "uvicorn", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


# ---- progress ------------------------------------------------------------------------------------------------------


def bytes_text(count: float) -> str:
    """1234567 → 1.2 MB (powers of ten, as link speeds are)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """75 → 1:15."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


class Loading:
    """Load progress: a bar on a terminal, otherwise a line now and then, given to `say`."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic,
                 every_s: float = LINE_EVERY_S) -> None:
        self._say = say
        self._clock = clock
        self._every_s = every_s
        self._bar: Progress | None = None
        self._with_bar = False
        self._last_s = float("-inf")
        self._last_stage = ""

    def update(self, stage: str, *, node: str = "", layers_done: int = 0, layers_total: int = 0, bytes_done: int = 0,
               bytes_total: int = 0, eta_s: float | None = None, rate: float = 0.0) -> None:
        """The newest state of the load, as the engine's progress frames have it. rate: bytes a second."""
        said = describe(stage, node=node, layers_done=layers_done, layers_total=layers_total, bytes_done=bytes_done,
                        bytes_total=bytes_total, eta_s=eta_s, rate=rate)
        if err().is_terminal:
            self._draw(said, bytes_done, bytes_total)
            return
        now = self._clock()
        if stage != self._last_stage or now - self._last_s >= self._every_s:
            self._last_s, self._last_stage = now, stage
            self._say(said)

    def _draw(self, said: str, done: int, total: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        # Where there is little room the words are worth more than the bar.
        with_bar = bool(total) and err().width >= NARROW
        if self._bar is not None and with_bar != self._with_bar:
            self.close()
        if self._bar is None:
            self._with_bar = with_bar
            bar = [BarColumn(bar_width=20)] if with_bar else []
            self._bar = Progress(TextColumn("{task.description}"), *bar, TextColumn("{task.fields[percent]}"),
                                 console=err(), transient=True, refresh_per_second=5)
            self._bar.add_task(said, total=None, percent="")
            self._bar.start()
        # Not to the last column: a Ctrl-C is echoed behind the line, and must not begin another one.
        room = err().width - 4 - (21 if with_bar else 0) - (6 if total else 0)
        said = said if len(said) <= room else f"{said[: room - 1]}…"
        self._bar.update(self._bar.task_ids[0], description=said, total=total or None, completed=done,
                         percent=f"{100 * done / total:.0f} %" if total else "")

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        self._say(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Loading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(stage: str, *, node: str = "", layers_done: int = 0, layers_total: int = 0, bytes_done: int = 0,
             bytes_total: int = 0, eta_s: float | None = None, rate: float = 0.0) -> str:
    """`loading mini · 12/25 layers · 3.2 GB of 8.1 GB · 112.0 MB/s · 0:41 left`."""
    parts = [what] if (what := f"{stage} {node}".strip()) else []
    if layers_total:
        parts.append(f"{layers_done}/{layers_total} layers")
    if bytes_total:
        parts.append(f"{bytes_text(bytes_done)} of {bytes_text(bytes_total)}")
    if rate:
        parts.append(f"{bytes_text(rate)}/s")
    if eta_s is not None:
        parts.append(f"{seconds_text(eta_s)} left")
    return " · ".join(parts)
