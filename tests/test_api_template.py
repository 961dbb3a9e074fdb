"""Chat templates: the forms of Qwen and Gemma, in a sandbox, with honest errors."""

from __future__ import annotations

import json

import pytest

from hydra.api.template import ChatTemplate, recognise
from hydra.errors import ModelError, RequestError

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Köln", "days": 2}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
USER = {"role": "user", "content": "q"}

# The parts of real templates that matter here, in the models' own form.
QWEN3 = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN35 = QWEN3.replace(
    '<tool_call>\n{"name"',
    "<tool_call>\n<function={{ c.function.name }}>{% for k, v in c.function.arguments|items %}"
    '<parameter={{ k }}>\n{{ v }}\n</parameter>{% endfor %}</function>{"name"',
).replace("{% endif %}{% endif %}", "{% else %}<think>\n{% endif %}{% endif %}")
GEMMA2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA4 = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<|tool_call>call:' + c.function.name }}{% endfor %}<turn|>\n{% endfor %}<|turn>model\n"
    "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "tools", "think"),
    [
        (QWEN3, "hermes", "</think>"),
        (QWEN35, "xml", "</think>"),
        (GEMMA2, "generic", None),
        (GEMMA4, "gemma4", "<channel|>"),
    ],
)
def test_recognised_by_its_own_marks(source: str, tools: str, think: str | None) -> None:
    marks = recognise(source)
    assert (marks.tools, marks.think_close) == (tools, think)


def test_arguments_reach_the_template_as_an_object() -> None:
    text = ChatTemplate.of(QWEN3, "", "").render([USER, CALL, RESULT], TOOLS).text
    assert '{"name": "weather", "arguments": {"place": "Köln", "days": 2}}' in text
    assert "<tools>" in text and text.endswith("<|im_start|>assistant\n")
    text = ChatTemplate.of(QWEN35, "", "").render([USER, CALL, RESULT], TOOLS).text
    assert "<parameter=place>\nKöln\n</parameter><parameter=days>\n2\n</parameter>" in text


def test_reasoning_that_the_prompt_begins() -> None:
    template = ChatTemplate.of(QWEN35, "", "")
    begun = template.render([USER])
    assert begun.reasoning_open and begun.text.endswith("<think>\n")
    closed = template.close_reasoning(begun)
    assert not closed.reasoning_open and closed.text.endswith("<think>\n</think>\n\n")
    assert not template.render([USER], enable_thinking=False).reasoning_open


def test_a_template_without_tools_gets_them_in_words() -> None:
    text = (
        ChatTemplate.of(GEMMA2, "<bos>", "")
        .render([{"role": "system", "content": "Be brief."}, USER, CALL, RESULT], TOOLS)
        .text
    )
    assert text.count("<bos>") == 1 and '"name": "weather"' in text and "Be brief." in text
    assert (
        json.dumps({"tool_call": {"name": "weather", "arguments": {"place": "Köln", "days": 2}}}, ensure_ascii=False)
        in text
    )
    assert text.endswith("<start_of_turn>user\nResult of the function call: rain<end_of_turn>\n<start_of_turn>model\n")


def test_a_system_message_where_there_is_no_such_role() -> None:
    text = ChatTemplate.of(GEMMA2, "", "").render([{"role": "system", "content": "Be brief."}, USER]).text
    assert text.startswith("<start_of_turn>user\nBe brief.\n\nq<end_of_turn>")


def test_what_the_template_refuses_is_said_in_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate.of(GEMMA2, "", "").render([USER, USER])


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [{"function": None}]},
    ],
)
def test_messages_that_cannot_be_read(message: dict) -> None:
    with pytest.raises(RequestError):
        ChatTemplate().render([message])


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    text = (
        ChatTemplate()
        .render([{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
        .text
    )
    assert text.startswith("<|im_start|>system\na\nb<|im_end|>")


def test_no_template_is_chatml_and_says_so() -> None:
    template = ChatTemplate.of(None, "", "")
    assert not template.own and template.render([USER]).text == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set x = messages.append(1) %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate.of(source, "", "").render([USER])


def test_a_template_that_is_no_jinja() -> None:
    with pytest.raises(ModelError, match="not valid jinja"):
        ChatTemplate.of("{% if %}", "", "").render([USER])


def test_helpers_that_templates_use() -> None:
    source = (
        "{{ strftime_now('%Y') | length }}{{ {'ä': 1} | tojson }}{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}"
        "{% endif %}{{ x }}{% endfor %}{% generation %}g{% endgeneration %}"
    )
    assert ChatTemplate.of(source, "", "").render([USER]).text == '4{"ä": 1}1g'


def test_only_the_stand_in_ends_by_a_text() -> None:
    assert ChatTemplate.of("", "", "").render([USER]).stops == ("<|im_end|>",)
    assert ChatTemplate.of(QWEN3, "", "").render([USER]).stops == ()
