"""The end of a terminal's text that is still being written: lines printed for good, and below them a few drawn anew.

Only what has changed is written, each picture in one write, so that nothing flickers; what is printed for good is never
touched again, so that the terminal's scrollback stays whole, whatever the window's size does. Knows nothing of what
the lines say.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

# Terminals that know it show a picture at once (DEC private mode 2026); others ignore it.
BEGIN, END = "\x1b[?2026h", "\x1b[?2026l"


class Screen:
    """Lines at a terminal's end. The cursor must be at the start of an empty line when it begins.

    write: takes text for the terminal. size: its columns and rows.
    """

    def __init__(self, write: Callable[[str], None], size: Callable[[], tuple[int, int]] | None = None) -> None:
        self._write = write
        self._size: Callable[[], tuple[int, int]] = size or shutil.get_terminal_size
        self._tail: list[str] = []
        self._drawn_at = tuple(self._size())

    @property
    def width(self) -> int:
        """Columns to be used: the last one stays free, as terminals differ in what comes after it."""
        return max(10, self._size()[0] - 1)

    @property
    def height(self) -> int:
        return max(2, self._size()[1])

    def draw(self, fixed: Sequence[str], tail: Sequence[str]) -> None:
        """Print `fixed` for good in the place of the old tail, and a new tail below; of one that is higher than the
        window, its end. Lines of a tail must not be wider than `width`."""
        tail = list(tail)[1 - self.height:] if tail else []
        old, new = self._tail, [*fixed, *tail]
        same = 0
        if self._size() == self._drawn_at:
            if not fixed and tail == old:
                return
            while same < min(len(old), len(new)) and old[same] == new[same]:
                same += 1
        else:
            # A window that became narrower may show an old line as two, or cut it: going up by what was drawn never
            # reaches what is printed for good. One that became lower has let the rest go out of reach.
            old = old[1 - self.height:]
            self._drawn_at = self._size()
        if tail:
            same = min(same, len(new) - 1)
        self._write(f"{BEGIN}{self._change(old, new, same, bool(tail))}{END}")
        self._tail = tail

    def _change(self, old: list[str], new: list[str], same: int, stays: bool) -> str:
        """What turns the old lines into the new ones, from the first that differs. stays: the cursor remains on the
        last line."""
        up = len(old) - 1 - same
        if not old:
            out = ""
        elif up < 0:
            out = "\r\n"
        elif up == 0 and same < len(new) and old[same] and new[same].startswith(old[same]) and self._plain(old[same]):
            # The usual case: the last line has grown.
            out, new = "", [*new[:same], new[same][len(old[same]):], *new[same + 1:]]
        else:
            out = f"\x1b[{up}A\r" if up else "\r"
        out += "\r\n".join(f"{line}\x1b[K" for line in new[same:])
        if not stays and new[same:]:
            out += "\r\n"
        return f"{out}\x1b[J" if old else out

    @staticmethod
    def _plain(line: str) -> bool:
        """No style is open at its end that the rest would have begun before."""
        return "\x1b" not in line or line.endswith("\x1b[0m")
