"""Text and token ids ↔ turns: the prompt, the tool call, the tool response (§2.1, Fig 3).

Token in, token out: sampled ids are kept as they are and never re-tokenized; only the prompt and
the tool responses are encoded, and a tool's text is encoded with special tokens disabled, so that
no program can print a tag that the chat format believes. The tags and the JSON shape of a call are
the paper's; the wording of the prose is ours.

This module runs nothing: it does not execute calls, and it does not judge answers.
"""

import json
import re
from dataclasses import dataclass
from typing import Literal, Protocol

from .types import ToolCall, ToolResult, ToolStatus

TOOL_NAME = "execute_python_code_with_standard_io"  # Fig 3, and the published weights
RELEASE_TOOL_NAME = "python_code_with_standard_io"  # the release's configuration
STOP_TOKEN = "<|im_end|>"

TOOL_SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Run Python code with the given standard input and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The Python program to run."},
                "input": {
                    "type": "string",
                    "description": "Text for standard input; may be empty.",
                },
            },
            "required": ["code", "input"],
        },
        "return": {"type": "string", "description": "Standard output, or the error."},
    },
}

REASON_INSTRUCTION = (
    "You solve the user's problem. Think first and write your thoughts inside <reason> </reason>; "
    "then give the solution inside <answer> </answer>."
)
TOOL_INSTRUCTION = (
    "\n\n# Tools\n\nYou can call the functions below while you solve the problem.\n"
    "<tools>\n{schema}\n"
    "</tools>\n\nTo call one, write a JSON object with its name and arguments inside "
    "<tool_call> tags:\n"
    '<tool_call>\n{{"name": <function name>, "arguments": <arguments object>}}\n</tool_call>'
)
USER_INSTRUCTION = (
    "Put the solution inside <answer> </answer>; it is read from \\boxed{{}}.\n\n{question}"
)


class Tokenizer(Protocol):
    """What the kit needs of a tokenizer. `special=False` encodes tags in the text as plain text."""

    stop_id: int

    def encode(self, text: str, special: bool = True) -> list[int]: ...

    def decode(self, token_ids) -> str: ...


@dataclass(frozen=True)
class Frame:
    """The template's own text around a question and around a tool response."""

    before_question: str = "<|im_start|>user\n"
    after_question: str = "<|im_end|>\n<|im_start|>assistant\n"
    before_response: str = "\n<|im_start|>user\n<tool_response>"
    after_response: str = "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    stop_token: str = STOP_TOKEN  # ends an assistant turn: sampled, hence trained


@dataclass(frozen=True)
class ChatFormat:
    """The words around a dialogue; everything that a template would decide, as data.

    A prefix is forced at the start of assistant turns and is prompt, hence untrained:
    the paper opens the first turn with `<think>`, the release every turn with `<reason>`. The
    frame is ChatML, or read from a model's own template (`templates.chat_format`).
    """

    system: str
    user: str = "{question}"
    first_prefix: str = ""
    next_prefix: str = ""
    tool_names: tuple[str, ...] = (TOOL_NAME, RELEASE_TOOL_NAME)
    response_chars: int = 20_000  # cap on a tool response, in characters; the tail is kept
    frame: Frame = Frame()

    def prompt(self, question: str) -> str:
        """The text of the prompt, up to and including the opened assistant turn."""
        system = f"<|im_start|>system\n{self.system}<|im_end|>\n" if self.system else ""
        asked = self.frame.before_question + self.user.format(question=question)
        return f"{system}{asked}{self.frame.after_question}{self.first_prefix}"


def chat_format(style: str, *, tools: bool, response_chars: int) -> ChatFormat:
    """The named formats: `paper` (Fig 3), `release`, and `nano`, of few words.

    Raises ValueError for another name.
    """
    if style == "nano":
        system = "Use the tool." if tools else "No tool."
        return ChatFormat(system=system, response_chars=response_chars)
    if style not in ("paper", "release"):
        raise ValueError(f"chat format {style!r} is unknown; choose nano, paper or release")
    schema = json.dumps(TOOL_SCHEMA)
    prefix = ("<think>", "") if style == "paper" else ("<reason>", "<reason>")
    if style == "release":
        schema = schema.replace(TOOL_NAME, RELEASE_TOOL_NAME)
    return ChatFormat(
        system=REASON_INSTRUCTION + (TOOL_INSTRUCTION.format(schema=schema) if tools else ""),
        user=USER_INSTRUCTION,
        first_prefix=prefix[0],
        next_prefix=prefix[1],
        response_chars=response_chars,
    )


@dataclass(frozen=True)
class ParsedTurn:
    """What one assistant turn says: closed reason blocks, calls, closed answers, in order."""

    reasoning: list[str]
    calls: list[ToolCall]
    answers: list[str]


_TAG = re.compile(r"<(/?)(reason|tool_call|answer)>")
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell it, no file or tokenizer takes it


def _closed(text: str) -> list[tuple[str, int, int]]:
    """Every opening tag that closes: its name, where its contents start, where its block ends.

    A block closes at the next closing tag of its name. A `<reason>` that opens again before that
    never closes. One pass from the right, so that the time is linear in the text.
    """
    found, closing = [], {}
    for match in reversed(list(_TAG.finditer(text))):
        is_closing, name = match[1], match[2]
        if is_closing:
            closing[name] = match
            continue
        end = closing.get(name)
        if end is not None:
            found.append((name, match.end(), end.end()))
        if name == "reason":
            closing.pop(name, None)
    return found[::-1]


@dataclass(frozen=True)
class Block:
    """A closed block of a turn: its tag, and where it starts and ends, the tags included."""

    tag: Literal["reason", "tool_call", "answer"]
    start: int
    end: int

    def body(self, text: str) -> str:
        """The text between the tags."""
        return text[self.start + len(self.tag) + 2 : self.end - len(self.tag) - 3]


def blocks(text: str) -> list[Block]:
    """The blocks of one assistant turn from left to right; any text has exactly one reading.

    A call needs both tags. A call inside a closed `<reason>` block is part of the thought and is
    not a block; after an unclosed `<reason>` it is one. An answer counts wherever it is closed, but
    not inside a call. Other tags, `<think>` among them, are plain text.
    """
    found: list[Block] = []
    position = reason_end = 0
    for name, start, after in _closed(text):
        if start < position or (start < reason_end and (name != "answer" or after > reason_end)):
            continue
        found.append(Block(name, start - len(name) - 2, after))
        if name == "reason":
            reason_end = after
        else:
            position = after
    return found


def parse_turn(text: str) -> ParsedTurn:
    """Read one assistant turn: its reasoning, calls and answers, by the rules of `blocks`."""
    bodies: dict[str, list[str]] = {"reason": [], "tool_call": [], "answer": []}
    for block in blocks(text):
        bodies[block.tag].append(block.body(text))
    calls = [parse_call(body) for body in bodies["tool_call"]]
    return ParsedTurn(bodies["reason"], calls, bodies["answer"])


def parse_call(raw: str) -> ToolCall:
    """One call from the text between the tags; `malformed` says what is wrong, None if nothing is.

    `input` may be left out and is then empty. Other arguments are ignored.
    """
    try:
        value = json.loads(raw.strip())
    except (ValueError, RecursionError) as error:
        return ToolCall(None, None, raw=raw, malformed=f"invalid JSON: {error}")
    problem, name, arguments = None, None, None
    if not isinstance(value, dict):
        problem = f"expected a JSON object, found {_json_kind(value)}"
    else:
        name, arguments = value.get("name"), value.get("arguments")
        if not isinstance(name, str) or not name:
            problem, name = 'field "name" must be a non-empty string', None
        elif not isinstance(arguments, dict):
            problem = f'field "arguments" must be an object, found {_json_kind(arguments)}'
        elif not isinstance(arguments.get("code"), str):
            problem = 'argument "code" must be a string'
        elif not isinstance(arguments.get("input", ""), str):
            problem = 'argument "input" must be a string'
        elif _SURROGATE.search(f"{name}{arguments['code']}{arguments.get('input', '')}"):
            problem, name = "invalid Unicode: a lone surrogate escape", None
    if problem:
        return ToolCall(name, None, raw=raw, malformed=problem)
    return ToolCall(name, arguments["code"], arguments.get("input", ""), raw=raw)


def _json_kind(value) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "nothing"}
    return names.get(type(value), "number")


def render_call(code: str, stdin: str = "", name: str = TOOL_NAME) -> str:
    """A well-formed call, as a model should write it. A closing tag in the program is escaped."""
    arguments = {"code": code, "input": stdin}
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    body = body.replace("</", "<\\/")
    return f"<tool_call>{body}</tool_call>"


_FAILURES = {
    ToolStatus.TIMEOUT: "the program ran out of time",
    ToolStatus.MEMORY: "the program ran out of memory",
    ToolStatus.OUTPUT_LIMIT: "the program printed too much",
}


_ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]{6,16}\b")  # "<generator object <genexpr> at 0x7f…>"


def response_text(call: ToolCall, result: ToolResult, limit_chars: int) -> str:
    """What the model reads of a result (§2.1): output, or the error. Never the time it took.

    Addresses of objects are masked: they differ at every run, and a killed run resumes the same.

    At most `limit_chars` characters: of an output or a one-line error the head is kept, of a longer
    error the tail, where a traceback names the cause.
    """
    stdout, stderr = (_ADDRESS.sub("0x...", text) for text in (result.stdout, result.stderr))
    if result.status is ToolStatus.OK:
        return (stdout.rstrip("\n") or "no output")[:limit_chars]
    if result.status is ToolStatus.MALFORMED:
        return f"invalid call: {call.malformed}"[:limit_chars]
    if result.status is ToolStatus.UNKNOWN_TOOL:
        return f"unknown tool: {call.name}"[:limit_chars]
    said = stderr.strip() or _FAILURES.get(result.status, "the program failed")
    text = "\n".join(part for part in (stdout.rstrip("\n"), said) if part)
    return text[-limit_chars:] if "\n" in text else text[:limit_chars]


def encode_response(text: str, chat: ChatFormat, tokenizer: Tokenizer) -> list[int]:
    """The tokens that answer a turn: end of the assistant turn's line, tool response, next header.

    The assistant's own stop token was sampled and is not repeated. All of these have mask 0.
    """
    before = tokenizer.encode(chat.frame.before_response)
    after = tokenizer.encode(chat.frame.after_response + chat.next_prefix)
    return before + tokenizer.encode(text, special=False) + after
