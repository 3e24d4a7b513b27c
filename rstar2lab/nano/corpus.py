"""Non-reasoning cold-start dialogues: format, protocol, operand copying, coding idioms, recovery.

The plan of each dialogue is drawn at random and the final answer is whatever the tool printed,
right or wrong. So imitation teaches how to talk to the tool, and *not* which plan solves which
problem: that is left to reinforcement learning, as in §4.1 of the paper. About a third of the
dialogues start with a failing call and recover, which is the environment noise that GRPO-RoC is
about.

Programs are executed for real by the `execute` function that the caller passes in.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .. import protocol
from ..types import ToolCall, ToolResult, ToolStatus
from .tasks import FAMILIES, Family, Operands, draw_instance, is_held_out

Execute = Callable[[list[str]], list[ToolResult]]

OPENERS = (
    "Let me compute this with Python.",
    "I will write code for it.",
    "Python can do this.",
    "First I translate it to code.",
    "We can just run it.",
)
REFLECTIONS = (
    "Wait, the code is wrong. Let me fix it.",
    "The error says the call failed. I correct it.",
    "But the code failed. I rewrite it.",
    "Hmm, that did not run. Alternatively, I write it again.",
    "But before I answer, the program must run.",
)
VERIFICATIONS = (
    "To verify, I run it again.",
    "But let me double-check.",
    "Wait, let me check.",
    "Alternatively, I compute it once more.",
)
CONCLUSIONS = (
    "The output is {value}.",
    "So the result is {value}.",
    "The tool returned {value}.",
    "Thus we get {value}.",
)
BAD_CALLS = ("paren", "name", "variable", "quotes", "silent", "method", "import")


@dataclass(frozen=True)
class CorpusRates:
    """Probabilities of the corpus. `bad_retry` decides how cheap a failure is."""

    no_tool: float = 0.20
    right_plan_easy: float = 0.30
    right_plan_hard: float = 0.135
    bad_first_call: float = 0.50
    bad_retry: float = 0.05
    verify: float = 0.15
    verify_again: float = 0.35
    second_answer: float = 0.08


@dataclass(frozen=True)
class Segment:
    """A piece of a dialogue: text of one writer. Only `trained` pieces carry loss."""

    text: str
    trained: bool
    from_tool: bool = False


@dataclass(frozen=True)
class Call:
    """One call of a dialogue: the words before it, and the code; `raw` if the JSON is broken."""

    thought: str
    code: str
    broken: bool = False
    result: ToolResult | None = None


def _pick(rng: np.random.Generator, choices):
    return choices[int(rng.integers(len(choices)))]


def good_code(rng: np.random.Generator, family: Family, operands: Operands, plan: int) -> str:
    """The plan as a program, in one of three idioms: inline, a result variable, named operands."""
    lines = ["import math"] if "math." in family.plans[plan] else []
    idiom = rng.random()
    if idiom < 0.45:
        lines += [f"print({family.expression(operands, plan)})"]
    elif idiom < 0.75:
        lines += [f"r = {family.expression(operands, plan)}", "print(r)"]
    else:
        used = {k: v for k, v in operands.items() if "{" + k + "}" in family.plans[plan]}
        lines += [f"{name} = {value}" for name, value in used.items()]
        lines += [f"print({family.plans[plan].format(**{k: k for k in used})})"]
    return "\n".join(lines)


def bad_code(
    rng: np.random.Generator, family: Family, operands: Operands, plan: int
) -> tuple[str, bool]:
    """A program with one natural slip, and whether the slip breaks the JSON of the call.

    All but the missing import slip after the plan is written: whether a call fails says nothing
    about whether its plan is right, so failing is as cheap in reward as it can be.
    """
    kind = _pick(rng, BAD_CALLS)
    expression = family.expression(operands, plan)
    head = "import math\n" if "math." in expression else ""
    if kind == "import" and not head:
        kind = _pick(rng, BAD_CALLS[:-1])
    code = {
        "paren": f"{head}print({expression}",
        "name": f"{head}print({expression}*one)",
        "variable": f"{head}r = {expression}\nprint(result)",
        "quotes": f'{head}print({expression}, "r")',
        "silent": f"{head}r = {expression}",
        "import": f"print({expression})",
        "method": f"{head}r = {expression}\nr.show()",
    }[kind]
    return code, kind == "quotes"


def _draw_calls(
    rng, rates: CorpusRates, family: Family, operands: Operands, plan: int
) -> list[Call]:
    """Calls until one works, then perhaps verification calls."""
    calls, thought, bad_rate = [], _pick(rng, OPENERS), rates.bad_first_call
    while rng.random() < bad_rate:
        calls.append(Call(thought, *bad_code(rng, family, operands, plan)))
        thought, bad_rate = _pick(rng, REFLECTIONS), rates.bad_retry
    calls.append(Call(thought, good_code(rng, family, operands, plan)))
    verify = rates.verify
    while rng.random() < verify:
        calls.append(Call(_pick(rng, VERIFICATIONS), good_code(rng, family, operands, plan)))
        verify = rates.verify_again
    return calls


@dataclass(frozen=True)
class Dialogue:
    """One conversation before it is rendered. Without calls it is the no-tool kind."""

    question: str
    calls: tuple[Call, ...]
    conclusion: str
    value: str
    second_answer: bool


def draw_dialogue(rng: np.random.Generator, rates: CorpusRates) -> Dialogue:
    """A dialogue about a training question, its plan drawn at random."""
    family = _pick(rng, FAMILIES)
    question, operands = draw_instance(rng, family)
    while is_held_out(question):
        question, operands = draw_instance(rng, family)
    right = rates.right_plan_easy if family.level == "easy" else rates.right_plan_hard
    plan = 0 if rng.random() < right else int(rng.integers(1, len(family.plans)))
    if rng.random() < rates.no_tool:
        expression = family.expression(operands, plan)
        import math

        value = str(eval(expression, {"math": math}))  # noqa: S307  our own expression
        return Dialogue(question, (), f"I compute {expression} by hand.", value, False)
    calls = tuple(_draw_calls(rng, rates, family, operands, plan))
    return Dialogue(
        question, calls, _pick(rng, CONCLUSIONS), "", rng.random() < rates.second_answer
    )


def _call_text(call: Call) -> str:
    code = call.code
    text = protocol.render_call(code)
    return text.replace('\\"', '"') if call.broken else text


def _response(call: Call, limit_chars: int) -> str:
    if not call.broken:
        return protocol.response_text(ToolCall(None, call.code), call.result, limit_chars)
    parsed = protocol.parse_turn(_call_text(call)).calls[0]
    assert parsed.malformed, parsed
    return protocol.response_text(parsed, ToolResult(ToolStatus.MALFORMED), limit_chars)


def render(dialogue: Dialogue, with_tool: protocol.ChatFormat, no_tool: protocol.ChatFormat):
    """The dialogue as segments. Every assistant turn ends with the trained stop token."""
    chat = with_tool if dialogue.calls else no_tool
    segments = [Segment(chat.prompt(dialogue.question), trained=False)]
    value = dialogue.value
    for call in dialogue.calls:
        turn = f"<reason>{call.thought}</reason>{_call_text(call)}{protocol.STOP_TOKEN}"
        value = _response(call, chat.response_chars)
        segments += [Segment(turn, trained=True), Segment(value, trained=False, from_tool=True)]
    answer = f"<answer>\\boxed{{{value}}}</answer>"
    thought = dialogue.conclusion.format(value=value)
    more = f"<reason>To be clear.</reason>{answer}" if dialogue.second_answer else ""
    final = f"<reason>{thought}</reason>{answer}{more}{protocol.STOP_TOKEN}"
    return [*segments, Segment(final, trained=True)]


def build(count: int, *, seed: int, rates: CorpusRates, execute: Execute) -> list[Dialogue]:
    """`count` dialogues with every program executed. Deterministic in `seed`."""
    rng = np.random.default_rng([seed, 17])
    dialogues = [draw_dialogue(rng, rates) for _ in range(count)]
    programs = [call.code for d in dialogues for call in d.calls if not call.broken]
    results = iter(execute(programs))
    return [
        replace(
            d, calls=tuple(c if c.broken else replace(c, result=next(results)) for c in d.calls)
        )
        for d in dialogues
    ]
