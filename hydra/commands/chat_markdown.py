"""Markdown that grows: which of its blocks are finished, and how a block looks as lines of a terminal.

A finished block is never changed by what follows, so that it can be printed for good; only the unfinished last one has
to be drawn again. Knows nothing of screens or streams: text in, lines with ANSI codes out.
Source: CommonMark 0.31, appendix "A parsing strategy": blocks are found line by line, and only open ones can change.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from markdown_it import MarkdownIt
from rich.cells import cell_len, chop_cells
from rich.color import ColorSystem
from rich.console import Console
from rich.markdown import CodeBlock, Heading, ListItem, Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

# Lines of code before the newest that are read again to colour it: a longer string or comment loses its colour.
CONTEXT_LINES = 100
CODE_THEME = "ansi_dark"  # the terminal's own sixteen colours, light or dark
COLOR_SYSTEMS = {"standard": ColorSystem.STANDARD, "256": ColorSystem.EIGHT_BIT, "truecolor": ColorSystem.TRUECOLOR}
LISTS = ("bullet_list_open", "ordered_list_open")
STYLES = Theme({"markdown.code": "cyan", "markdown.h1": "bold underline", "markdown.h2": "bold",
                "markdown.h3": "bold", "markdown.h4": "bold italic", "markdown.block_quote": "italic",
                "markdown.table.header": "bold", "markdown.table.border": "dim"})
# Everything that moves a cursor or speaks to a terminal. An answer is text; whoever made it must not have more to say.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@lru_cache(maxsize=1)
def parser() -> MarkdownIt:
    """CommonMark with tables. HTML stays text, and so do link definitions: a person is to see all of an answer."""
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")


def harmless(text: str) -> str:
    """Without control characters but tabs and line ends."""
    return _CONTROL.sub("", text)


@dataclass(frozen=True)
class Block:
    """A piece of an answer that is shown as a whole.

    kind: `markdown`, or of a code block `fence` (its first or last line) and `code` (one line). gap: an empty line
    comes before it. number: of the first item, where the text is an ordered list. context: of `code`, the language and
    the lines before.
    """

    kind: str
    text: str
    gap: bool = True
    number: int | None = None
    context: tuple[str, str] = ("", "")


class Blocks:
    """An answer as it comes: `feed` returns the blocks that are finished by the new text, `tail` is what is not."""

    def __init__(self) -> None:
        self._text = ""
        self._fence: tuple[str, str] | None = None
        """Of an open code block: its mark, and the language."""
        self._code: list[str] = []
        self._gap = False
        self._number: int | None = None
        """Of the next item of the list that the rest goes on with."""

    def feed(self, text: str) -> list[Block]:
        """Add text."""
        self._text += harmless(text)
        return list(self._finished(self._text.rfind("\n") + 1))

    def finish(self) -> list[Block]:
        """What is left, once nothing more comes."""
        if self._text and not self._text.endswith("\n"):
            self._text += "\n"
        blocks = list(self._finished(len(self._text)))
        rest = self.tail()
        self._text = ""
        self._fence = None
        return [*blocks, *([rest] if rest else [])]

    def tail(self) -> Block | None:
        """The unfinished block as it stands."""
        if self._fence:
            return self._line(self._text) if self._text else None
        if not self._text.strip():
            return None
        return Block("markdown", self._text, self._gap, self._number)

    def _finished(self, whole: int) -> Iterator[Block]:
        """Blocks that end within the first `whole` characters, which are complete lines: half a line may yet become
        anything."""
        while whole:
            if self._fence:
                line, _, rest = self._text.partition("\n")
                yield self._take_code(line)
                taken = len(self._text) - len(rest)
            else:
                taken = 0
                for block, end in self._first(self._text[:whole]):
                    yield block
                    taken = end
                if not taken:
                    return
            self._text, whole = self._text[taken:], whole - taken

    def _take_code(self, line: str) -> Block:
        """One complete line of an open code block; its end where it is that."""
        mark, _ = self._fence or ("", "")
        stripped = line.strip()
        # Four columns in, it would be code. Source: CommonMark, section 4.5.
        if stripped.startswith(mark) and not stripped.strip(mark[0]) and len(line) - len(line.lstrip()) < 4:
            self._fence, self._gap = None, True
            return Block("fence", stripped, gap=False)
        block = self._line(line)
        self._code = [*self._code[1 - CONTEXT_LINES:], line]
        return block

    def _line(self, line: str) -> Block:
        language = self._fence[1] if self._fence else ""
        return Block("code", line, gap=False, context=(language, "\n".join(self._code)))

    def _first(self, text: str) -> Iterator[tuple[Block, int]]:
        """The first block of the text and where it ends; nothing while it may go on."""
        tokens = parser().parse(text)
        top = [token for token in tokens if token.level == 0 and token.nesting >= 0 and token.map]
        if not top:
            return
        first, lines = top[0], text.splitlines(keepends=True)
        start = _place(lines, _map(first)[0])
        if first.type == "fence":
            end = _place(lines, _map(first)[0] + 1)
            language = first.info.split()[0] if first.info.strip() else ""
            self._fence, self._code = (first.markup, language), []
            yield Block("fence", lines[_map(first)[0]].strip(), self._gap), end
            return
        items = [token for token in tokens if token.level == 1 and token.type == "list_item_open"
                 and _map(token)[0] < _map(first)[1]] if first.type in LISTS else []
        if items and self._number is None and first.type == "ordered_list_open":
            self._number = int(first.attrs.get("start", 1))
        if len(items) > 1:
            end = _place(lines, _map(items[1])[0])
            yield Block("markdown", text[start:end], self._gap, self._number), end
            self._gap = text[:end].endswith("\n\n")
            self._number = None if self._number is None else self._number + 1
        elif len(top) > 1:
            end = _place(lines, _map(top[1])[0])
            yield Block("markdown", text[start:end], self._gap, self._number), end
            self._gap, self._number = True, None


def _map(token: Any) -> tuple[int, int]:
    """First line of a block, and the line after it."""
    return int(token.map[0]), int(token.map[1])


def _place(lines: list[str], number: int) -> int:
    return sum(len(line) for line in lines[:number])


class _LeftHeading(Heading):
    """Headings begin where the text does."""

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Text]:
        yield self.text


class _PlainCode(CodeBlock):
    """Code inside lists and quotes, without a box around it."""

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Syntax]:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True,
                     background_color="default")


class _Item(ListItem):
    """Numbers with their full stop, as they were written."""

    def render_number(self, console: Any, options: Any, number: int, last_number: int) -> Iterator[Segment]:
        across = len(str(last_number)) + 3
        lines = console.render_lines(self.elements, options.update(width=options.max_width - across), style=self.style)
        style = console.get_style("markdown.item.number")
        for index, line in enumerate(lines):
            yield Segment(f"{number}. ".rjust(across) if index == 0 else " " * across, style)
            yield from line
            yield Segment("\n")


class _Answer(Markdown):
    elements = {**Markdown.elements, "heading_open": _LeftHeading, "fence": _PlainCode, "code_block": _PlainCode,
                "list_item_open": _Item}

    def __init__(self, text: str, number: int | None) -> None:
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        self.parsed = parser().parse(text)
        if number is not None and self.parsed and self.parsed[0].type == "ordered_list_open":
            self.parsed[0].attrs["start"] = number
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"  # models end a line where they want it to end


class Renderer:
    """Blocks as lines of a terminal of so many colours (rich's `color_system`)."""

    def __init__(self, colors: str | None) -> None:
        self._system: Any = COLOR_SYSTEMS.get(colors or "")

    def lines(self, block: Block, width: int, *, whole: bool = True) -> list[str]:
        """The block, with the empty line before it where there is to be one. Lines take at most `width` columns, but
        for code: a terminal wraps that itself, so that it can be copied. whole: false for a block that is not finished,
        where no line is wider."""
        gap = [""] if block.gap else []
        if block.kind == "fence":
            return [*gap, *self.print(Text(block.text, style="dim"), width)]
        if block.kind == "code":
            return [*gap, *self._code(block, width, whole)]
        text = block.text if whole else closed(block.text)
        return [*gap, *self.print(_Answer(text, block.number), width)]

    def _code(self, block: Block, width: int, whole: bool) -> list[str]:
        language, before = block.context
        syntax = Syntax("", _lexer(language), theme=CODE_THEME, background_color="default")
        code = f"{before}\n{block.text}" if before else block.text
        found = syntax.highlight(code).split("\n", allow_blank=True)
        line = found[code.count("\n")] if len(found) > code.count("\n") else Text()
        if whole:
            return [self._styled(list(line.render(self._console(80), end="")))]
        line.expand_tabs(8)
        return self.print(line, width)

    def print(self, what: Any, width: int) -> list[str]:
        """Anything that rich can draw, without empty lines around it and spaces after it."""
        lines = [_trimmed(line) for line in self._console(width).render_lines(what, pad=False)]
        while len(lines) > 1 and not lines[0]:
            del lines[0]
        while len(lines) > 1 and not lines[-1]:
            del lines[-1]
        return [self._styled(line) for line in lines]

    @staticmethod
    def _console(width: int) -> Console:
        """rich's layout; it writes nowhere."""
        return Console(file=io.StringIO(), width=max(width, 4), theme=STYLES, highlight=False, markup=False,
                       emoji=False, legacy_windows=False)

    def _styled(self, line: list[Segment]) -> str:
        return "".join(segment.style.render(segment.text, color_system=self._system) if segment.style else segment.text
                       for segment in line)


def _trimmed(line: list[Segment]) -> list[Segment]:
    """Without what only spaces would show."""
    kept = list(line)
    while kept and not kept[-1].text.rstrip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept


def _lexer(language: str) -> Any:
    """pygments' lexer for a code block; tabs stay what they are, for Makefiles' sake."""
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    options = {"tabsize": 0, "stripnl": False}
    try:
        return get_lexer_by_name(language or "text", **options)
    except ClassNotFound:
        return get_lexer_by_name("text", **options)


def closed(text: str) -> str:
    """An unfinished block whose last inline mark is closed, so that it looks as it will."""
    head, _, last = text.rpartition("\n\n")
    if last.count("```"):
        return text
    if last.count("`") % 2:
        last = last[:-1] if last.endswith("`") else f"{last}`"
    elif last.count("**") % 2:
        last = last[:-2] if last.endswith("**") else f"{last.rstrip()}{'*' if last.endswith('*') else '**'}"
    return f"{head}\n\n{last}" if head else last


def wrapped(text: str, width: int) -> list[str]:
    """Plain text broken at words, and inside words that are wider than a line. At least one line."""
    lines, line = [], ""
    for word in re.findall(r"\s*\S+|\s+$", text.expandtabs(8)):
        if cell_len(line + word) <= width:
            line += word
            continue
        if line.strip():
            lines.append(line.rstrip())
            word = word.lstrip()
        parts = chop_cells(word, max(width, 2)) if word else [""]
        lines += parts[:-1]
        line = parts[-1]
    return [*lines, line]


def dimmed(lines: Iterable[str]) -> list[str]:
    """The same lines in the terminal's faint style."""
    return [f"\x1b[2m{line}\x1b[0m" if line else "" for line in lines]
