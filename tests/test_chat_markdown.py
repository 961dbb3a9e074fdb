"""hydra/commands/chat_markdown.py: blocks are finished when nothing can change them, and look as Markdown does."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from hydra.commands.chat_markdown import Block, Blocks, Renderer, closed, harmless, wrapped

ANSWER = """\
# Title

Some *text* with **bold** and `code`,
second line. <b>not HTML</b>
1. one
1. two with

   ```bash
   ls -l
   ```
1. three

- a
  - nested

- b

```python
def f(x):
    '''doc
    more'''
\treturn x
```
| a | b |
|---|--:|
| 1 | 20 |

> quote
> more

~~~
``` not the end
~~~
#hashtag [1]: https://example.org

Last ~~x~~ 日本語"""


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def shown(text: str, width: int = 60, step: int = 1) -> list[str]:
    """An answer that comes in pieces, as it is printed for good."""
    blocks, renderer, lines = Blocks(), Renderer("standard"), []
    for start in range(0, len(text), step):
        for block in blocks.feed(text[start:start + step]):
            lines += renderer.lines(block, width)
    for block in blocks.finish():
        lines += renderer.lines(block, width)
    return lines


@pytest.mark.parametrize("step", [1, 2, 7, 50])
def test_pieces_of_any_size_give_the_same(step):
    assert shown(ANSWER, step=step) == shown(ANSWER, step=len(ANSWER))


def test_how_it_looks():
    assert plain(shown(ANSWER)) == [
        "Title", "", "Some text with bold and code,", "second line. <b>not HTML</b>", "",
        " 1. one", " 2. two with", "    ls -l", " 3. three", "",
        " • a", "    • nested", "", " • b", "",
        "```python", "def f(x):", "    '''doc", "    more'''", "\treturn x", "```", "",
        " a   b", " ─────", " 1  20", "",
        "▌ quote", "▌ more", "",
        "~~~", "``` not the end", "~~~", "", "#hashtag [1]: https://example.org", "", "Last x 日本語"]


def test_styles_and_their_absence():
    coloured = "\n".join(shown(ANSWER))
    assert "\x1b[1mbold\x1b[0m" in coloured and "\x1b[36mcode\x1b[0m" in coloured
    doc = next(line for line in shown(ANSWER) if "more'''" in line)
    assert "33" in doc, "a string of several lines keeps its colour, though lines are printed one by one"


@pytest.mark.parametrize("width", [20, 37, 60])
def test_no_line_is_wider_than_the_terminal(width):
    for length in range(0, len(ANSWER), 5):
        blocks = Blocks()
        done = blocks.feed(ANSWER[:length])
        tail = blocks.tail()
        lines = [line for block in done if block.kind != "code" for line in Renderer(None).lines(block, width)]
        lines += Renderer(None).lines(tail, width, whole=False) if tail else []
        assert max(map(cell_len, plain(lines)), default=0) <= width


def test_long_lines_of_code_are_left_to_the_terminal():
    code = "x = " + "1 + " * 30 + "1"
    assert plain(shown(f"```python\n{code}\n```\n", 20))[1] == code, "so that it can be copied"
    partial = Block("code", code, context=("python", ""))
    assert len(Renderer(None).lines(partial, 20, whole=False)) > 3, "but one that is drawn again fits"


def test_code_comes_line_by_line():
    blocks = Blocks()
    assert [block.kind for block in blocks.feed("```\none\ntw")] == ["fence", "code"]
    tail = blocks.tail()
    assert tail is not None and (tail.kind, tail.text) == ("code", "tw")
    assert [block.text for block in blocks.feed("o\n```\n")] == ["two", "```"]
    assert blocks.tail() is None


def test_half_a_line_decides_nothing():
    blocks = Blocks()
    assert blocks.feed("one\n#") == [], "a heading would end the paragraph, …"
    assert blocks.feed("hashtag\n") == [], "… a word that begins so does not"
    assert [block.text for block in blocks.finish()] == ["one\n#hashtag\n"]


def test_lists_end_item_by_item():
    blocks = Blocks()
    done = blocks.feed("5. a\n5. b\n5. c")
    assert [(block.text, block.number) for block in done] == [("5. a\n", 5)]
    assert [(block.text, block.number) for block in blocks.finish()] == [("5. b\n", 6), ("5. c\n", 7)]


def test_an_unclosed_code_block_ends_with_the_answer():
    assert plain(shown("```c\nint x;")) == ["```c", "int x;"]
    assert shown("") == [] and shown("\n\n") == []


def test_nothing_that_a_terminal_would_obey():
    assert harmless("a\x1b[2Jb\r\x07c\x9b1md\te\n") == "a[2Jbc1md\te\n"
    assert "\x1b[2J" not in "".join(shown("a\x1b[2J\n\n```\n\x1b[2J\n```\n"))


@pytest.mark.parametrize(("text", "whole"), [
    ("a **bold", "a **bold**"), ("a **", "a "), ("a **bold*", "a **bold**"), ("a **b** c", "a **b** c"),
    ("a `co", "a `co`"), ("a `", "a "), ("**x\n\na `b`", "**x\n\na `b`"), ("", "")])
def test_open_marks_are_closed_while_it_comes(text, whole):
    assert closed(text) == whole


def test_wrapping_counts_columns():
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("日本語日本語", 4) == ["日本", "語日", "本語"]
    assert wrapped("abcdefgh ij", 4) == ["abcd", "efgh", "ij"]
    assert wrapped("", 5) == [""]
