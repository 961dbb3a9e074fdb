"""What goes on beside an answer: the keyboard, the clock of its view, and a look at the head while nothing comes.

A thread of its own, as the main thread waits for the answer. Keys that are typed meanwhile go to the next prompt, as in
a shell; one folds the reasoning. Ctrl-C stays the terminal's signal, and never tears a picture that is being drawn.
"""

from __future__ import annotations

import select
import signal
import termios
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import HydraError
from .chat_view import FRAME_S, View

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyPress

    from .chat_client import Piece

LOOK_AFTER_S, LOOK_EVERY_S = 1.5, 1.0


class Pulse:
    """Runs while an answer comes; `with`.

    health: asked how the head is when nothing has come for LOOK_AFTER_S. keys: prompt_toolkit's input of a terminal.
    """

    def __init__(self, view: View, health: Callable[[], dict[str, Any]], keys: Input | None = None) -> None:
        self._view = view
        self._health = health
        self._keys = keys
        self._typed: list[KeyPress] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._drawing = False
        self._interrupted = False
        self._before: Any = None
        self._modes: list[Any] | None = None

    def feed(self, piece: Piece) -> None:
        """Show one more piece. Raises: KeyboardInterrupt, after the picture, where Ctrl-C came meanwhile."""
        self._drawing = True
        try:
            self._view.feed(piece)
        finally:
            self._drawing = False
        if self._interrupted:
            raise KeyboardInterrupt

    def __enter__(self) -> Pulse:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        if self._keys is not None:
            self._modes = _keys_at_once(self._keys.fileno())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if self._keys is not None:
            from prompt_toolkit.input.typeahead import store_typeahead

            store_typeahead(self._keys, [*self._typed, *self._keys.flush_keys()])
            if self._modes is not None:
                termios.tcsetattr(self._keys.fileno(), termios.TCSANOW, self._modes)
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._drawing:
            self._interrupted = True
        else:
            raise KeyboardInterrupt

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._over.is_set():
            if self._keys is None or self._keys.closed:
                self._over.wait(FRAME_S)
            elif select.select([self._keys.fileno()], [], [], FRAME_S)[0]:
                self._take_keys(self._keys)
            now = time.monotonic()
            if self._view.silent_s >= LOOK_AFTER_S and now - looked_s >= LOOK_EVERY_S:
                looked_s = now
                try:
                    self._view.waiting(self._health())
                except HydraError:
                    pass  # the answer's own connection says it, with what to do
            if not self._over.is_set():
                self._view.tick()

    def _take_keys(self, keys: Input) -> None:
        from prompt_toolkit.keys import Keys

        for press in keys.read_keys():
            if press.key == Keys.ControlT:
                self._view.toggle()
            else:
                self._typed.append(press)


def _keys_at_once(descriptor: int) -> list[Any] | None:
    """Have the terminal hand over keys as they are typed, without showing them. Returns its modes before, or None for
    what is no terminal. Signals stay: Ctrl-C is one."""
    try:
        before = termios.tcgetattr(descriptor)
        changed = termios.tcgetattr(descriptor)
        changed[0] &= ~termios.ICRNL
        changed[3] &= ~(termios.ICANON | termios.ECHO)
        changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    except termios.error:
        return None
    return before
