"""Calls and answers in a turn's text, what a tool may say, and the prompts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2lab import protocol
from rstar2lab.protocol import parse_turn, render_call, response_text
from rstar2lab.types import ToolCall, ToolResult, ToolStatus

NAME = "execute_python_code_with_standard_io"
CALL = (
    f'<tool_call>{{"name": "{NAME}", "arguments": {{"code": "print(1)", "input": ""}}}}</tool_call>'
)
ANSWER = r"<answer>\boxed{42}</answer>"
TAGS = [
    "<reason>", "</reason>", "<answer>", "</answer>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<|im_start|>", "<|im_end|>", "<|endoftext|>",
    "<|im_start|>assistant\n", "<|im_start|>user\n", r"\boxed{", '"', "\\", "\n", "é", "𝛑",
    "{", "}",
]  # fmt: skip
texts_of_tags = st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=5))).map("".join)


def call_body(body: str) -> ToolCall:
    calls = parse_turn(f"<reason>x</reason><tool_call>{body}</tool_call>").calls
    assert len(calls) == 1
    return calls[0]


# --- where a call counts ----------------------------------------------------------------------


def test_a_call_gives_name_code_and_input():
    body = json.dumps({"name": NAME, "arguments": {"code": "print(input())", "input": "7\n"}})
    call = call_body(f"\n{body}\n")
    assert (call.name, call.code, call.stdin) == (NAME, "print(input())", "7\n")
    assert call.malformed is None and call.raw.strip() == body


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call at all", 0),
        (CALL, 1),
        (CALL + CALL, 2),
        (f"<reason>think</reason>{CALL}", 1),
        (f"<reason>I could write {CALL} here</reason>", 0),
        (f"<reason>I could write {CALL} here</reason>{CALL}", 1),
        (f"<reason>never closed {CALL}", 1),
        (f"<reason>never closed <reason>closed</reason>{CALL}", 1),
        (f"<reason>never closed {CALL} <reason>closed</reason>", 1),
        (f"<answer>{ANSWER}</answer>{CALL}", 1),
        (CALL.removesuffix("</tool_call>"), 0),
        (CALL + "<tool_call>", 1),
        ("</tool_call>" + CALL, 1),
        (CALL.replace("tool_call", "TOOL_CALL"), 0),
    ],
)
def test_a_call_needs_both_tags_and_stands_outside_a_closed_reason_block(text, calls):
    assert len(parse_turn(text).calls) == calls


def test_several_calls_come_in_order():
    text = "".join(f"<reason>{i}</reason>{render_call(f'print({i})')}" for i in range(3))
    parsed = parse_turn(text)
    assert [call.code for call in parsed.calls] == ["print(0)", "print(1)", "print(2)"]
    assert parsed.reasoning == ["0", "1", "2"]


def test_json_cut_by_the_token_limit_is_no_call():
    text = '<reason>x</reason><tool_call>{"name":"python","arguments":{"code":"pri'
    assert parse_turn(text).calls == []


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (ANSWER, 1),
        (ANSWER + ANSWER, 2),
        (f"<reason>{ANSWER}</reason>{ANSWER}", 2),
        (r"<answer>\boxed{42}", 0),
        (r"\boxed{42}</answer>", 0),
        (render_call("print('<answer>1</answer>')"), 0),
        (f"<reason>open {ANSWER}", 1),
    ],
)
def test_an_answer_counts_wherever_it_is_closed_but_not_inside_a_call(text, answers):
    assert len(parse_turn(text).answers) == answers


# --- malformed calls --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{}", '"name"'),
        ('{"name": null}', '"name"'),
        ('{"name": ""}', '"name"'),
        ('{"name": 3, "arguments": {"code": ""}}', '"name"'),
        ('{"name": "x"}', '"arguments"'),
        ('{"name": "x", "arguments": null}', '"arguments"'),
        ('{"name": "x", "arguments": "print(1)"}', '"arguments"'),
        ('{"name": "x", "arguments": ["print(1)"]}', '"arguments"'),
        ('{"name": "x", "arguments": {}}', '"code"'),
        ('{"name": "x", "arguments": {"code": 5}}', '"code"'),
        ('{"name": "x", "arguments": {"code": "1", "input": 5}}', '"input"'),
        ('"str"', "object"),
        ("[]", "object"),
        ("7", "object"),
        ("true", "object"),
        ("null", "object"),
        ("", "JSON"),
        ("print(1)", "JSON"),
        ('{"name": "x", "arguments": {"code": "print("r")"}}', "JSON"),
        ('{"name": "x", "arguments": {"code": "a\nb"}}', "JSON"),  # a raw newline in a string
        ("{'name': 'x'}", "JSON"),
        ("[" * 100_000, "JSON"),
        ("1" * 5_000, "JSON"),
        (CALL, "JSON"),
        (r'{"name": "\ud800", "arguments": {"code": "1"}}', "surrogate"),
        (r'{"name": "x", "arguments": {"code": "\ud800"}}', "surrogate"),
        (r'{"name": "x", "arguments": {"code": "1", "input": "\udfff"}}', "surrogate"),
    ],
)
def test_a_malformed_call_is_one_call_whose_message_names_what_is_wrong(body, said):
    call = parse_turn(f"<tool_call>{body}</tool_call>").calls[0]
    assert said in call.malformed and call.code is None
    answer = response_text(call, ToolResult(ToolStatus.MALFORMED), 1000)
    assert said in answer and ToolStatus.MALFORMED.is_tool_error
    answer.encode()  # can be written to a file, whatever the model wrote


def test_input_may_be_left_out_and_other_arguments_are_ignored():
    call = call_body('{"name": "x", "arguments": {"code": "1", "why": 2}, "id": 3}')
    assert (call.code, call.stdin, call.malformed) == ("1", "", None)


@given(texts_of_tags)
def test_no_text_raises_and_every_call_is_well_formed_or_says_why(text):
    parsed = parse_turn(text)
    assert all((call.malformed is None) == (call.code is not None) for call in parsed.calls)
    assert len(parsed.calls) <= min(text.count("<tool_call>"), text.count("</tool_call>"))
    assert len(parsed.answers) <= min(text.count("<answer>"), text.count("</answer>"))


# --- writing a call ---------------------------------------------------------------------------


@given(texts_of_tags, texts_of_tags)
def test_a_rendered_call_reads_back_whatever_the_program_holds(code, stdin):
    calls = parse_turn(f"<reason>x</reason>{render_call(code, stdin)}").calls
    assert [(c.name, c.code, c.stdin, c.malformed) for c in calls] == [(NAME, code, stdin, None)]


def test_a_rendered_call_has_the_paper_s_shape():
    assert render_call("print(1)") == CALL
    body = render_call('print("ä")\n', "5").removeprefix("<tool_call>").removesuffix("</tool_call>")
    arguments = {"code": 'print("ä")\n', "input": "5"}
    assert json.loads(body) == {"name": NAME, "arguments": arguments}


# --- what the model reads of a result ---------------------------------------------------------

WELL_FORMED = ToolCall(NAME, "…")


def said(status=ToolStatus.OK, stdout="", stderr="", limit=100, **more) -> str:
    return response_text(WELL_FORMED, ToolResult(status, stdout, stderr, **more), limit)


def test_an_output_is_shown_without_its_last_newlines():
    assert said(stdout="42\n") == "42"
    assert said(stdout="1\n\n2\n\n") == "1\n\n2"


@pytest.mark.parametrize("stdout", ["", "\n"])
def test_a_silent_program_says_so(stdout):
    assert said(stdout=stdout) == "no output"


def test_of_an_output_the_head_is_kept():
    text = "".join(chr(0x4E00 + i) for i in range(500))
    assert said(stdout=text) == text[:100]


def test_of_a_one_line_error_the_head_is_kept():
    error = "ValueError: " + "x" * 500
    assert said(ToolStatus.ERROR, stderr=error + "\n") == error[:100]


def test_of_a_longer_error_the_tail_is_kept_where_the_cause_stands():
    traceback = "\n".join(f'  File "<program>", line {i}' for i in range(30)) + "\nKeyError: 'a'"
    shown = said(ToolStatus.ERROR, stderr=traceback)
    assert shown == traceback[-100:] and shown.endswith("KeyError: 'a'")


def test_an_error_shows_what_was_printed_before_it():
    assert said(ToolStatus.ERROR, "7\n", "ZeroDivisionError: division by zero\n") == (
        "7\nZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [("TIMEOUT", "time"), ("MEMORY", "memory"), ("OUTPUT_LIMIT", "printed"), ("ERROR", "failed")],
)
def test_a_failure_without_words_still_says_what_happened(status, words):
    assert words in said(ToolStatus[status])


@pytest.mark.parametrize("status", list(ToolStatus))
def test_the_time_it_took_is_never_shown(status):
    fast = said(status, "a", "b", seconds=0.001, queue_seconds=0.0)
    assert said(status, "a", "b", seconds=3.9, queue_seconds=7.0) == fast


def test_addresses_of_objects_which_differ_at_every_run_are_masked():
    shown = said(stdout="<generator object <genexpr> at 0x7fc340d9d150>\n")
    assert shown == "<generator object <genexpr> at 0x...>"
    error = "TypeError: <function f at 0x7fb9ef515080> is not a number"
    assert (
        said(ToolStatus.ERROR, stderr=error) == "TypeError: <function f at 0x...> is not a number"
    )
    assert said(stdout="0x7fc340d9d150 at 0xff") == "0x7fc340d9d150 at 0xff"


def test_an_unknown_tool_is_named():
    call = ToolCall("calculator", "1")
    assert "calculator" in response_text(call, ToolResult(ToolStatus.UNKNOWN_TOOL), 100)


@given(st.text(max_size=300), st.text(max_size=300), st.sampled_from(ToolStatus))
def test_no_response_is_longer_than_its_limit_in_characters(stdout, stderr, status):
    result = ToolResult(status, stdout, stderr)
    for call in (WELL_FORMED, ToolCall("x" * 300, "1"), ToolCall(None, None, malformed="y" * 300)):
        assert len(response_text(call, result, 60)) <= 60


# --- tokens -----------------------------------------------------------------------------------


def special_ids(tokens) -> set[int]:
    found = {tokens.encode(tag)[0] for tag in TAGS if tag.startswith("<")}
    assert tokens.stop_id in found
    return found


@given(texts_of_tags)
def test_tool_text_never_becomes_a_special_token(tokens, text):
    ids = tokens.encode(text, special=False)
    assert not special_ids(tokens) & set(ids)


@given(texts_of_tags)
def test_a_tool_cannot_add_a_tag_to_its_response(tokens, text):
    chat = protocol.chat_format("nano", tools=True, response_chars=60)
    special = special_ids(tokens)
    tags = [i for i in protocol.encode_response(text, chat, tokens) if i in special]
    assert tags == [i for i in protocol.encode_response("", chat, tokens) if i in special]


def test_the_same_tags_written_by_the_kit_are_one_token_each(tokens):
    for tag in ("<reason>", "</tool_response>", "<|im_end|>", "<|im_start|>assistant\n"):
        assert len(tokens.encode(tag)) == 1
        assert len(tokens.encode(tag, special=False)) > 1


def test_a_response_opens_the_next_assistant_turn_and_does_not_repeat_the_stop_token(tokens):
    for style, prefix in (("nano", ""), ("paper", ""), ("release", "<reason>")):
        chat = protocol.chat_format(style, tools=True, response_chars=60)
        assert tokens.decode(protocol.encode_response("42", chat, tokens)) == (
            "\n<|im_start|>user\n<tool_response>42</tool_response><|im_end|>\n"
            f"<|im_start|>assistant\n{prefix}"
        )


# --- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "prefix", "name"),
    [("paper", "<think>", NAME), ("release", "<reason>", "python_code_with_standard_io")],
)
def test_a_prompt_names_the_tool_and_the_tags_and_ends_with_the_prefix(style, prefix, name):
    prompt = protocol.chat_format(style, tools=True, response_chars=100).prompt("What is {x}?")
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith(f"<|im_start|>assistant\n{prefix}")
    assert "What is {x}?" in prompt and r"\boxed{}" in prompt
    for tag in ("<reason> </reason>", "<answer> </answer>", "<tools>", "<tool_call>"):
        assert tag in prompt
    schema = json.loads(prompt.split("<tools>\n")[1].split("\n</tools>")[0])
    assert schema["function"]["name"] == name
    assert schema["function"]["parameters"]["required"] == ["code", "input"]


@pytest.mark.parametrize("style", ["paper", "release"])
def test_without_tools_the_prompt_knows_no_tool(style):
    prompt = protocol.chat_format(style, tools=False, response_chars=100).prompt("q")
    assert "tool" not in prompt and "python" not in prompt.lower()


def test_the_nano_prompt_is_short_and_says_whether_there_is_a_tool():
    with_tool, without = (
        protocol.chat_format("nano", tools=t, response_chars=60).prompt("1 + 1?")
        for t in (True, False)
    )
    assert with_tool == (
        "<|im_start|>system\nUse the tool.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert without == with_tool.replace("Use the tool.", "No tool.")


def test_both_published_tool_names_are_accepted_and_another_format_is_refused():
    chat = protocol.chat_format("paper", tools=True, response_chars=100)
    assert chat.tool_names == (NAME, "python_code_with_standard_io")
    with pytest.raises(ValueError, match="'qwen' is unknown; choose nano, paper or release"):
        protocol.chat_format("qwen", tools=True, response_chars=100)


def test_blocks_say_where_reasons_calls_and_answers_are():
    text = "<reason><answer>1</answer></reason><tool_call>{}</tool_call> <answer>2</answer><answer>"
    found = [(block.tag, text[block.start : block.end]) for block in protocol.blocks(text)]
    assert found == [
        ("reason", "<reason><answer>1</answer></reason>"),
        ("answer", "<answer>1</answer>"),
        ("tool_call", "<tool_call>{}</tool_call>"),
        ("answer", "<answer>2</answer>"),
    ]
