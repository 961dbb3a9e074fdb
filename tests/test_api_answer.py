"""Answers taken apart: the same result however they are cut, and nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hydra.api.answer import AnswerParser, Delta
from hydra.api.template import Marks

THINK = ("<think>", "</think>")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}},
            },
        },
    }
]


def read(parser: AnswerParser, text: str, size: int) -> tuple[str, str, list[tuple[str, Any]]]:
    deltas: list[Delta] = []
    for at in range(0, len(text), size):
        deltas += parser.feed(text[at : at + size])
    deltas += parser.finish()
    return (
        "".join(d.text for d in deltas if d.kind == "content"),
        "".join(d.text for d in deltas if d.kind == "reasoning"),
        [(d.name, json.loads(d.arguments)) for d in deltas if d.kind == "call"],
    )


HERMES = '<tool_call>\n{"name": "f", "arguments": {"s": "a</b>", "n": 1}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=f>\n<parameter=s>\n12\nlines\n</parameter>\n"
    "<parameter=n>\n7\n</parameter>\n<parameter=l>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
)
GEMMA = '<|tool_call>call:f{s:<|"|>a, {b}: "c"<|"|>,n:-2,l:[1,<|"|>x<|"|>,true,{k:null}]}<tool_call|>'

CASES: list[tuple[Marks, str, tuple[str, str, list[Any]]]] = [
    (Marks(*THINK, "hermes"), "plain text with < and <tool", ("plain text with < and <tool", "", [])),
    (Marks(*THINK, "hermes"), "<think>\nhm\n\nhm\n</think>\n\nanswer ", ("answer ", "hm\n\nhm", [])),
    (Marks(*THINK, "hermes"), f"First.\n\n{HERMES}\n{HERMES}", ("First.", "", [("f", {"s": "a</b>", "n": 1})] * 2)),
    (Marks(*THINK, "hermes"), f"<think>x</think>{HERMES}", ("", "x", [("f", {"s": "a</b>", "n": 1})])),
    (Marks(*THINK, "hermes"), HERMES.removesuffix("\n</tool_call>"), ("", "", [("f", {"s": "a</b>", "n": 1})])),
    (
        Marks(*THINK, "hermes"),
        "<tool_call>no json</tool_call> and on",
        ("<tool_call>no json</tool_call> and on", "", []),
    ),
    (Marks(*THINK, "hermes"), '<tool_call>{"name": "f", "arg', ('<tool_call>{"name": "f", "arg', "", [])),
    (Marks(*THINK, "hermes"), "<think>never closed", ("", "never closed", [])),
    (Marks(*THINK, "xml"), f"So:\n{XML}", ("So:", "", [("f", {"s": "12\nlines", "n": 7, "l": [1, 2]})])),
    (
        Marks("<|channel>thought\n", "<channel|>", "gemma4"),
        f"<|channel>thought\nhm<channel|>{GEMMA}",
        ("", "hm", [("f", {"s": 'a, {b}: "c"', "n": -2, "l": [1, "x", True, {"k": None}]})]),
    ),
    (
        Marks("<|channel>thought\n", "<channel|>", "gemma4"),
        "<|tool_call>call:f{s:<tool_call|>.",
        ("<|tool_call>call:f{s:<tool_call|>.", "", []),
    ),
    (Marks(tools="generic"), '{"tool_call": {"name": "f", "arguments": {"n": 1}}}', ("", "", [("f", {"n": 1})])),
    (Marks(tools="generic"), '{"response": "no tool\\nneeded"}', ("no tool\nneeded", "", [])),
    (Marks(tools="generic"), '{"response": "cut', ('{"response": "cut', "", [])),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("marks", "text", "wanted"), CASES)
def test_however_it_is_cut(marks: Marks, text: str, wanted: Any, size: int) -> None:
    assert read(AnswerParser(marks, TOOLS), text, size) == wanted


@pytest.mark.parametrize("size", [1, 1000])
def test_reasoning_begun_by_the_prompt(size: int) -> None:
    parser = AnswerParser(Marks(*THINK, "xml"), reasoning_open=True)
    assert read(parser, "hm\n</think>\n\nyes", size) == ("yes", "hm", [])


def test_without_tools_their_marks_are_text() -> None:
    assert read(AnswerParser(Marks(*THINK, "hermes")), HERMES, 3) == (HERMES, "", [])


def test_with_reasoning_left_in() -> None:
    parser = AnswerParser(Marks(*THINK, "hermes"), reasoning=False)
    assert read(parser, "<think>a</think>b", 2) == ("<think>a</think>b", "", [])


def test_a_forced_call() -> None:
    parser = AnswerParser(Marks(*THINK, "hermes"), TOOLS, forced=True)
    assert read(parser, '{"name": "f", "arguments": {"n": 2}}', 4) == ("", "", [("f", {"n": 2})])


def test_text_comes_as_soon_as_it_can() -> None:
    parser = AnswerParser(Marks(*THINK, "hermes"), TOOLS)
    assert [delta.text for delta in parser.feed("one two")] == ["one two"]
    assert [delta.text for delta in parser.feed(" <to")] == []
    assert [delta.text for delta in parser.feed("ast")] == [" <toast"]


def test_white_space_of_plain_answers_is_kept() -> None:
    assert read(AnswerParser(Marks()), "  indented\n  code\n\n", 3) == ("  indented\n  code\n\n", "", [])
