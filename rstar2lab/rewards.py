r"""The answer-only reward (Eq 3): 1 if the boxed answer equals the reference, else 0.

The answer is the last `\boxed{}` inside the last closed `<answer>` block, the blocks being those of
`protocol.parse_turn`: what Eq 5 counts and what Eq 3 scores are the same. Integers are compared
here, digit by digit; everything else goes to math-verify in a killable process (`verifier`), which
is imported on first need: the one exception to this module being pure. There is no format, length
or tool term.

Every verdict carries a reason. A verifier that cannot decide raises `ServiceFailure`: an outage is
never a reward of 0. Differs from the release: it scores the whole response by two checkers joined
by "or", so a box in the reasoning or a number printed by a tool can count.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from . import protocol

Reason = Literal[
    "exact_integer",
    "equal",
    "mismatch",
    "no_answer",
    "empty_box",
    "parse_failure",
    "verify_timeout",
]


class ServiceFailure(RuntimeError):
    """A service of ours could not do its work: the trajectory is void, not wrong."""


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and how that was decided.

    reason: "exact_integer" equal integers; "equal" the same text, or math-verify says so;
    "mismatch"; "no_answer" no closed answer block or no closed box in it; "empty_box";
    "parse_failure" one side is no mathematics; "verify_timeout" the deadline passed.
    """

    correct: bool
    reason: Reason


Check = Callable[[str, str], Verdict]
"""`check(prediction, gold)`: the slow path."""


def answer_reward(response_text: str, gold: str, check: Check | None = None) -> Verdict:
    r"""Score a whole response given as flat text (Eq 3).

    `<tool_response>…</tool_response>` spans are removed first, an unclosed one to the end: a tool
    can print the tags. A trainer that has the turns takes `turns_reward`.

    Raises: ValueError if `gold` is empty; ServiceFailure if the verifier cannot decide.
    """
    return turns_reward([_without_tool_responses(response_text)], gold, check)


def turns_reward(turn_texts: Sequence[str], gold: str, check: Check | None = None) -> Verdict:
    r"""Score a trajectory by the texts that the model wrote, one per turn (Eq 3).

    Each turn is read by itself, so that no answer spans two; the last closed answer of all counts.
    Nothing is removed: `<tool_response>` written by the model is plain text.

    Raises: ValueError if `gold` is empty; ServiceFailure if the verifier cannot decide.
    """
    answers = [answer for text in turn_texts for answer in protocol.parse_turn(text).answers]
    box = _last_box(answers[-1]) if answers else None
    return verify(None if box is None else f"\\boxed{{{box}}}", gold, check)


def extract_answer(response_text: str) -> str | None:
    r"""Contents of the last `\boxed{}` inside the last closed `<answer>` block.

    None if there is no closed block, no box in it, or the last box is unclosed or empty. A block
    inside a tool call is a part of the program, not an answer.
    """
    answers = protocol.parse_turn(response_text).answers
    return (_last_box(answers[-1]) or None) if answers else None


def verify(prediction: str | None, gold: str, check: Check | None = None) -> Verdict:
    r"""Compare an answer with the reference.

    Both are bare contents; if there are boxes in one, its last box counts. Integers are compared
    exactly: signs, Unicode minus, leading zeros and groups of three digits ("1,234") do not matter.
    The rest is decided by `check`, by default the shared math-verify pool (`verifier.check`), whose
    policy stands in its docstring.

    Raises: ValueError if `gold` is empty; ServiceFailure if the verifier cannot decide.
    """
    gold_text = _bare(gold)
    if not gold_text:
        raise ValueError(f"the reference answer is empty: {gold!r}")
    if prediction is None:
        return Verdict(False, "no_answer")
    text = _bare(prediction)
    if text is None:
        return Verdict(False, "no_answer")
    if not text:
        return Verdict(False, "empty_box")
    integers = _canonical_integer(text), _canonical_integer(gold_text)
    if None not in integers:
        same = integers[0] == integers[1]
        return Verdict(same, "exact_integer" if same else "mismatch")
    if text.split() == gold_text.split():
        return Verdict(True, "equal")
    if check is None:
        from . import verifier

        check = verifier.check
    return check(text, gold_text)


def _without_tool_responses(text: str) -> str:
    kept, rest = [], text
    while True:
        before, opened, rest = rest.partition("<tool_response>")
        kept.append(before)
        if not opened:
            return "\n".join(kept)
        rest = rest.partition("</tool_response>")[2]


_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def _last_box(text: str) -> str | None:
    r"""Stripped contents of the last `\boxed{}`; of nested ones the outermost; None if unclosed."""
    open_groups: list[tuple[bool, int, int]] = []  # is_box, start of the command, of its contents
    box, box_start, last_start = None, -1, -1
    for match in _BRACE.finditer(text):
        token = match[0]
        if token.endswith("{") and not token == r"\{":
            is_box = token != "{"
            open_groups.append((is_box, match.start(), match.end()))
            last_start = match.start() if is_box else last_start
        elif token == "}" and open_groups:
            is_box, start, contents = open_groups.pop()
            if is_box:
                box, box_start = text[contents : match.start()].strip(), start
    is_unclosed = any(is_box and start > box_start for is_box, start, _ in open_groups)
    return None if is_unclosed or last_start < 0 else box


def _bare(text: str) -> str | None:
    r"""Contents of the last box if there is one, without `$ \( \[` delimiters and spaces around."""
    if "\\boxed" in text:
        text = _last_box(text)
        if text is None:
            return None
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(opening) : -len(closing)]
        if text == opening + inner + closing and opening not in inner:
            return inner.strip()
    return text


_INTEGER = re.compile(r"([+-]?) ?([0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)\.?")
_MINUS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d\u2013", "-"))
_GROUP_SEPARATOR = re.compile(r"\{,\}|,\\!|\\,|\u202f|\u2009")


def _canonical_integer(text: str) -> str | None:
    """Sign and digits without leading zeros, or None if the text is no plain integer."""
    text = _GROUP_SEPARATOR.sub(",", text.translate(_MINUS))
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return "-" + digits if match[1] == "-" and digits != "0" else digits
