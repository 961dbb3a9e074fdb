"""build/screenshots.py and what it made: pictures of terminals, and nothing in them of the box that they come from."""

from __future__ import annotations

import importlib.util
import re
import socket
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("screenshots", ROOT / "build" / "screenshots.py")
assert _spec is not None and _spec.loader is not None
screenshots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(screenshots)
NAMES = ["up", "chat", "ps", "doctor"]


def words(svg: str) -> str:
    """What a reader sees, line by line."""
    rows: dict[float, str] = {}
    for element in xml.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        place = float(element.get("y", "0"))
        rows[place] = rows.get(place, "") + "".join(element.itertext())
    return "\n".join(rows[place] for place in sorted(rows)).replace("\xa0", " ")


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_there_and_tell_nothing_of_a_box(name):
    svg = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    text = words(svg)
    assert f"hydra {name}" in text, "the title"
    assert f"docs/images/{name}.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
    for private in ("/root", "/home", "/work", str(ROOT), socket.gethostname()):
        assert private not in text
    assert "http" not in re.sub(r"http://(127\.0\.0\.1|www\.w3\.org)|https://www\.textualize\.io", "", svg), \
        "a picture fetches nothing"
    assert len(svg.encode()) < 150_000


def test_what_the_pictures_show():
    text = {name: words((ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")) for name in NAMES}
    assert "tower" in text["ps"] and "mini" in text["ps"] and "request" in text["ps"]
    assert "curl http://127.0.0.1" in text["up"] and "6 on mini, 12 on tower" in text["up"]
    assert ">>> " in text["chat"] and "tok/s · context" in text["chat"]
    assert "ok" in text["doctor"] and "checks passed" in text["doctor"]


def test_a_screen_becomes_a_picture():
    raw = "one\r\n\x1b[1;31mred\x1b[0m\x1b[2mfaint\x1b[0m\r\ngone\r\x1b[K<kept> & so on"
    lines = screenshots.screen_of(raw, 40, 10)
    assert [line.plain for line in lines] == ["one", "redfaint", "<kept> & so on"]
    styles = {str(span.style) for span in lines[1].spans}
    assert "bold red" in styles and "bright_black" in styles, "faint text is shown as such"
    svg = screenshots.svg_of(lines, "hydra test", 40)
    shown = [line for line in words(svg).splitlines() if line.strip()]
    assert sorted(shown) == sorted(["hydra test", "one", "redfaint", "<kept> & so on"])
    assert svg == screenshots.svg_of(lines, "hydra test", 40), "the same screen, the same picture"
