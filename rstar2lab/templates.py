"""A model's own chat template as a `protocol.ChatFormat`, after a check that it can be trusted.

Training appends: what was sampled stays, and only the text around it is new. A template is fit for
that if rendering a dialogue message by message never changes what stands already. Those that strip
earlier reasoning, add an empty `<think></think>` or close a turn at the start of the next message
are refused, with the reason; nothing is trained on a guess.

The check plays a short dialogue with two tool calls through the template and reads off the text
between its parts. This module renders text; it samples nothing and knows no model.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from . import protocol
from .protocol import ChatFormat, Frame

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = dict[str, object]
Span = tuple[int, int]


class TemplateError(ValueError):
    """A chat template that would train on something else than what the model reads or writes.

    check: which check refused it.
    """

    def __init__(self, message: str, check: str = "template"):
        super().__init__(message)
        self.check = check


@dataclass(frozen=True)
class Finding:
    """One line of the check: "ok", "note" (works, worth knowing), or "FAIL" (refused)."""

    name: str
    verdict: Literal["ok", "note", "FAIL"]
    found: str


@dataclass(frozen=True)
class Template:
    """A chat template with the names of the special tokens it may use."""

    source: str  # where it was read, for messages
    jinja: str
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, …
    added_tokens: tuple[str, ...] = (protocol.STOP_TOKEN,)  # that the tokenizer keeps in one piece
    tokenizer_file: Path | None = None

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[dict] = (), opened: bool = False
    ) -> str:
        """The text of a dialogue; `opened` adds the start of the next assistant turn.

        Raises: TemplateError if the template refuses the messages.
        """
        return self._rendered(messages, tools, opened)[0]

    def marked_spans(
        self, messages: Sequence[Message], tools: Sequence[dict] = ()
    ) -> tuple[str, list[Span]]:
        """The text of a dialogue, and the spans that the template marks as the assistant's.

        Raises: TemplateError without `{% generation %}` markers, or if they mark nothing or
        everything: a mask from it would train nothing, or the prompt.
        """
        text, spans = self._rendered(messages, tools, False)
        marked = sum(end - start for start, end in spans)
        if not 0 < marked < len(text):
            found = "mark everything" if marked else "mark nothing"
            if not _MARKER.search(self.jinja):
                found = "are missing"
            raise TemplateError(
                f"{self.source}: the generation markers {found}; a loss mask cannot be read from "
                "this template. Put {% generation %} … {% endgeneration %} around assistant turns",
                "generation markers",
            )
        return text, spans

    def _rendered(self, messages, tools, opened) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=self.jinja,
                add_generation_prompt=opened,
                return_assistant_tokens_mask=bool(_MARKER.search(self.jinja)),
                **self.special_tokens,
            )
        except Exception as error:  # the boundary to a foreign program
            raise TemplateError(f"{self.source}: {type(error).__name__}: {error}") from error
        return texts[0], (spans[0] if spans else [])


def load(source: str | Path) -> Template:
    """The template of a tokenizer folder, or of a model's name in the local Hugging Face cache.

    Read are `chat_template.jinja`, else `chat_template` in `tokenizer_config.json`, and the added
    tokens of `tokenizer.json`.

    Raises: TemplateError if there is no template or no `tokenizer.json`.
    """
    files = {name: _file(source, name) for name in _FILES}
    if files["tokenizer.json"] is None:
        raise TemplateError(f"{source}: no tokenizer.json there; expected a tokenizer folder")
    config = _json(files["tokenizer_config.json"])
    jinja = config.get("chat_template")
    if isinstance(jinja, list):  # several named ones
        jinja = {item["name"]: item["template"] for item in jinja}.get("default")
    if files["chat_template.jinja"] is not None:
        jinja = files["chat_template.jinja"].read_text(encoding="utf-8")
    if not jinja:
        raise TemplateError(f"{source}: the tokenizer has no chat template; choose another style")
    tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    added = _json(files["tokenizer.json"]).get("added_tokens", [])
    names = tuple(sorted((token["content"] for token in added), key=len, reverse=True))
    return Template(str(source), jinja, tokens, names, files["tokenizer.json"])


_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _file(source: str | Path, name: str) -> Path | None:
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils import cached_file

    try:
        found = cached_file(str(source), name, local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(found) if found else None


def _json(path: Path | None) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path is not None else {}


# --- the check ------------------------------------------------------------------------------------


def chat_format(template: Template, *, tools: bool, response_chars: int) -> ChatFormat:
    """The template as data for the rollout: its text around question, turn and tool response.

    Raises: TemplateError with every reason if the check refuses the template.
    """
    found, played = _examine(template, tools)
    faults = [f"  {f.name}: {f.found}" for f in found if f.verdict == "FAIL"]
    if faults or played is None:
        reasons = "\n".join(faults)
        raise TemplateError(f"{template.source}: the chat template is refused\n{reasons}")
    return replace(played.chat, response_chars=response_chars)


def check(template: Template, *, tools: bool = True) -> list[Finding]:
    """What the check found, refusals included: the table of `rstar2lab doctor --template`."""
    return _examine(template, tools)[0]


_QUESTION = "How many primes are below 30?"
_PROGRAMS = (("print(len([2, 3, 5]))", "3\nso far"), ("print(10)", "10"))
_ANSWER = "So there are ten. <answer>\\boxed{10}</answer>"
_THOUGHT = "I count them."
_FORCED = re.compile(r"(?:</?\w+>\s*)+$")  # `<think>` or `<reason>` at the end of the header
_EMPTY_THINK = re.compile(r"<think>\s*</think>")


@dataclass(frozen=True)
class _Voice:
    """How one template is talked to: what it says itself, what we have to say."""

    template: Template
    opening: list[Message]
    tools: list[dict]
    respond: Callable[[str], Message]

    def render(self, messages: Sequence[Message] = (), opened: bool = False) -> str:
        return self.template.render([*self.opening, *messages], tools=self.tools, opened=opened)


@dataclass(frozen=True)
class _Played:
    """What playing the dialogue showed."""

    messages: list[Message]
    text: str  # of all messages, the next turn opened
    pieces: list[tuple[str, bool]]  # as a rollout encodes them; True: the text of a tool
    prefix: str  # what a message's content needs in front, to be rendered as it was sampled
    chat: ChatFormat


def _examine(template: Template, tools: bool) -> tuple[list[Finding], _Played | None]:
    found: list[Finding] = []
    try:
        voice = _voice(template, tools, found)
        played = _play_all(voice, found)
        found += [_last_turn(voice, played), _markers(voice, played), _tokens(template, played)]
    except TemplateError as error:
        return [*found, Finding(error.check, "FAIL", str(error))], None
    return found, played


def _voice(template: Template, tools: bool, found: list[Finding]) -> _Voice:
    """Ask the template for what it can say; the rest goes into the system or user message."""
    instructed = "<answer>" in template.render([_user(_QUESTION)])
    reads_back, shown = False, False
    if tools:
        reads_back, shown = _reads_calls_back(template), _shows_tools(template)
    said = "" if instructed else protocol.REASON_INSTRUCTION
    if tools and not (reads_back and shown):
        schema = json.dumps(protocol.TOOL_SCHEMA)
        said += protocol.TOOL_INSTRUCTION.format(schema=schema)
    user = _QUESTION if instructed else protocol.USER_INSTRUCTION.format(question=_QUESTION)
    schemas = [protocol.TOOL_SCHEMA] if reads_back and shown else []
    opening = _opening(template, said.strip(), user, schemas)
    who = "the template" if instructed else "the kit"
    found.append(Finding("instruction", "ok", f"how to answer is said by {who}"))
    if tools:
        who = "the template" if schemas else "the kit: the template shows none, or another form"
        found.append(Finding("tools", "ok" if schemas else "note", f"described by {who}"))
    return _Voice(template, opening, schemas, _respond(template, opening, schemas))


def _shows_tools(template: Template) -> bool:
    try:
        shown = template.render([_user(_QUESTION)], tools=[protocol.TOOL_SCHEMA])
    except TemplateError:
        return False
    return protocol.TOOL_NAME in shown


def _reads_calls_back(template: Template) -> bool:
    """Whether a structured call comes out in the form that `protocol.parse_turn` reads."""
    code = _PROGRAMS[0][0]
    try:
        text = template.render([_user(_QUESTION), _structured("", code)])
    except TemplateError:
        return False
    calls = protocol.parse_turn(text.partition(_QUESTION)[2]).calls
    return [(call.name, call.code) for call in calls] == [(protocol.TOOL_NAME, code)]


def _opening(template: Template, said: str, user: str, tools: list[dict]) -> list[Message]:
    """The messages before the first turn; without a system role all goes to the user's."""
    if not said:
        return [_user(user)]
    messages = [{"role": "system", "content": said}, _user(user)]
    try:
        is_shown = said in template.render(messages, tools=tools)
    except TemplateError:
        is_shown = False
    return messages if is_shown else [_user(f"{said}\n\n{user}")]


def _respond(template: Template, opening: list[Message], tools: list[dict]):
    """How a tool response is put: as the role "tool", else in a user message."""
    response = _PROGRAMS[0][1]  # of two lines: some templates write it as JSON
    for message in (_by_tool, _by_user):
        try:
            text = template.render([*opening, _plain("", "1"), message(response)], tools=tools)
        except TemplateError:
            continue
        if text.count(response) == 1:
            return message
    raise TemplateError(
        "a tool response is shown neither from the role tool nor from the user", "tool response"
    )


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _by_tool(text: str) -> Message:
    return {"role": "tool", "name": protocol.TOOL_NAME, "content": text}


def _by_user(text: str) -> Message:
    return _user(f"<tool_response>\n{text}\n</tool_response>")


def _plain(text: str, code: str) -> Message:
    return {"role": "assistant", "content": text + protocol.render_call(code)}


def _structured(text: str, code: str) -> Message:
    function = {"name": protocol.TOOL_NAME, "arguments": {"code": code, "input": ""}}
    call = {"type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


# --- the dialogue that is played ------------------------------------------------------------------


def _play_all(voice: _Voice, found: list[Finding]) -> _Played:
    """Play the dialogue with every kind of thought, in the first form that the template keeps.

    A rollout never renders a turn again, so one form of a turn is enough: as text, or with its call
    apart. The release's template adds words to the first form and keeps the second.
    """
    generation = _generation(voice)
    found.append(Finding("generation prompt", "ok", f"a turn is opened by {generation!r}"))
    forced = match[0] if (match := _FORCED.search(generation)) else ""
    first_fault = None
    for form in (_plain, _structured):
        for prefix in dict.fromkeys(("", forced)):
            try:
                plays = [
                    _play(voice, form, generation, prefix, thought) for thought in _thoughts(forced)
                ]
            except TemplateError as fault:
                first_fault = first_fault or fault
                continue
            return _agreed(plays, found)
    raise first_fault


def _thoughts(prefix: str) -> list[str]:
    """Ways to begin a turn after the forced prefix; every one must stay as it is."""
    opened = re.findall(r"<(/?)(\w+)>", prefix)
    if opened and not opened[-1][0]:
        closing = {"think": f"{_THOUGHT}\n</think>\n\nNow I run it."}
        return [closing.get(opened[-1][1], f"{_THOUGHT}</{opened[-1][1]}>")]
    return [
        f"<reason>{_THOUGHT}</reason>",
        f"<think>\n{_THOUGHT}\n</think>\n\nNow I run it.",
        "I run it at once.",
    ]


def _generation(voice: _Voice) -> str:
    """What `add_generation_prompt` adds behind the question."""
    closed, opened = voice.render(), voice.render(opened=True)
    _expect(closed, opened)
    if opened == closed:
        raise TemplateError("add_generation_prompt adds nothing", "generation prompt")
    if opened.count(_QUESTION) != 1:
        times = opened.count(_QUESTION)
        raise TemplateError(f"the question is shown {times} times, expected once", "question")
    return opened[len(closed) :]


def _play(voice: _Voice, form, generation: str, prefix: str, thought: str) -> _Played:
    """Render message by message; each rendering must begin with the one before."""
    whole, messages, frames = voice.render(), [], []
    pieces = [(whole + generation, False)]
    for code, response in _PROGRAMS:
        messages.append(form(prefix + thought, code))
        written = voice.render(messages)
        _expect(whole + generation + thought, written)
        end = written.rfind("</tool_call>") + len("</tool_call>")
        messages.append(voice.respond(response))
        closed, opened = voice.render(messages), voice.render(messages, opened=True)
        stop = _stop_token(voice.template, written[end:], closed[len(written) :])
        _expect(written, closed)
        _expect(opened, closed + generation)
        before, shown, after = opened[end + len(stop) :].partition(response)
        if not shown:
            raise TemplateError(f"the response {response!r} is not shown", "tool response")
        frames.append((before, after, stop))
        turn = written[len(whole + generation) : end] + stop
        pieces += [(turn, False), (before, False), (response, True), (after, False)]
        whole = closed
    if frames[0] != frames[1]:
        raise TemplateError(
            "the text around a tool response differs from turn to turn", "tool response"
        )
    chat = _chat(pieces[0][0], *frames[0])
    return _Played(messages, whole + generation, pieces, prefix, chat)


def _chat(prompt: str, before: str, after: str, stop: str) -> ChatFormat:
    """The pieces as a format; what is forced after the header is the prefix of a turn."""
    forced = match[0] if (match := _FORCED.search(prompt)) else ""
    before_question, _, after_question = (prompt.removesuffix(forced)).partition(_QUESTION)
    frame = Frame(before_question, after_question, before, after.removesuffix(forced), stop)
    return ChatFormat("", first_prefix=forced, next_prefix=forced, frame=frame)


def _expect(before: str, after: str) -> None:
    """Raises: TemplateError that says how, if `after` does not begin with `before`."""
    if after.startswith(before):
        return
    if len(_EMPTY_THINK.findall(after)) > len(_EMPTY_THINK.findall(before)):
        raise TemplateError("an empty <think></think> is added to a turn", "append-only")
    counts = [text.casefold().count(_THOUGHT.casefold()) for text in (before, after)]
    if counts[1] < counts[0]:
        raise TemplateError("the reasoning of an earlier turn is stripped", "append-only")
    place = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after)
    )
    raise TemplateError(
        f"after {before[max(0, place - 30) : place]!r} stood {before[place : place + 30]!r}, "
        f"now {after[place : place + 30]!r}",
        "append-only",
    )


def _stop_token(template: Template, tail: str, following: str) -> str:
    """The token that ends a turn: it must stand in the turn itself, to be sampled and trained."""
    stop = next((token for token in template.added_tokens if tail.startswith(token)), None)
    if stop is not None:
        return stop
    if not tail and following.startswith(template.added_tokens):
        raise TemplateError(
            f"the end of a turn belongs to the next message ({following[:24]!r}): it is never "
            "sampled nor trained, and the model does not learn to stop",
            "stop token",
        )
    raise TemplateError(
        f"a turn ends with {tail!r}, which does not begin with a token of its own", "stop token"
    )


def _agreed(plays: list[_Played], found: list[Finding]) -> _Played:
    """The first play; all must have shown the same frame."""
    chats = {play.chat for play in plays}
    if len(chats) > 1:
        raise TemplateError("the text around a turn depends on what the turn says", "append-only")
    chat = plays[0].chat
    prefix = f", each turn begins with {chat.first_prefix!r}" if chat.first_prefix else ""
    found += [
        Finding("append-only", "ok", f"two calls, every rendering begins with the last{prefix}"),
        Finding("reasoning", "ok", "kept as written, nothing inserted"),
        Finding("stop token", "ok", f"{chat.frame.stop_token!r}, inside the turn"),
    ]
    return plays[0]


def _last_turn(voice: _Voice, played: _Played) -> Finding:
    """An answer, then another question. A rollout ends before, so faults are only notes."""
    last = [*played.messages, {"role": "assistant", "content": played.prefix + _ANSWER}]
    try:
        text = voice.render(last)
        _expect(played.text + _ANSWER + played.chat.frame.stop_token, text)
        _expect(text, voice.render([*last, _user("And below 40?")]))
    except TemplateError as fault:
        return Finding("second question", "note", f"{fault}; a rollout asks only one question")
    return Finding("second question", "ok", "append-only across questions too")


def _markers(voice: _Voice, played: _Played) -> Finding:
    """Generation markers must cover each turn with its stop token, and nothing else."""
    name, stop = "generation markers", played.chat.frame.stop_token
    if not _MARKER.search(voice.template.jinja):
        found = "none: a mask read from this template is refused; a rollout's comes from sampling"
        return Finding(name, "note", found)
    text, spans = voice.template.marked_spans([*voice.opening, *played.messages], voice.tools)
    marked = [text[start:end] for start, end in spans]
    turns = [turn for turn, _ in played.pieces[1::4]]
    if marked == turns:
        return Finding(name, "ok", "around each turn, the stop token included")
    if len(marked) != len(turns):
        return Finding(name, "FAIL", f"mark {len(marked)} spans where {len(turns)} turns are")
    pairs = list(zip(turns, marked, strict=True))
    if all(turn in m for turn, m in pairs):
        first = marked[0].split(turns[0])
        found = f"mark more than is sampled: {first[0]!r} before a turn, {first[1]!r} after it"
        return Finding(name, "note", found)
    if all(turn.removesuffix(stop) in m for turn, m in pairs):
        return Finding(name, "FAIL", f"end before {stop!r}, so that stopping is never trained")
    return Finding(name, "FAIL", f"mark {marked[:1]} where the turn is {turns[:1]}")


def _tokens(template: Template, played: _Played) -> Finding:
    """The rollout's pieces, encoded one by one, must give the template's text back (T3)."""
    name = "tokens"
    if template.tokenizer_file is None:
        return Finding(name, "note", "not checked: there is no tokenizer file")
    from .nano.tokenizer import FileTokenizer

    tokens = FileTokenizer(template.tokenizer_file, played.chat.frame.stop_token)
    parts = [tokens.encode(text, special=not is_tool) for text, is_tool in played.pieces]
    ids, whole = [i for part in parts for i in part], tokens.encode(played.text)
    if tokens.decode(ids) != played.text:
        return Finding(name, "FAIL", "encoded piece by piece, the text does not come back")
    if any(part[-1] != tokens.stop_id for part in parts[1::4]):
        return Finding(name, "FAIL", "the stop token is not one token at the end of a turn")
    same = "the same" if ids == whole else "another split at the borders, the same text"
    return Finding(name, "ok", f"piece by piece as in one: {same} ({len(ids)} and {len(whole)})")
