"""Whatever a model writes has one typed outcome: through the parser, and through a whole rollout.

The fast tier takes a slice of the same stream of texts; the full tier all of it.
"""

import asyncio
import random
import time
from collections import Counter
from typing import get_args

import chats
import pytest
from tiny import FakeEnvironment

from rstar2lab import protocol, rewards, roc
from rstar2lab import rollout as rollouts
from rstar2lab.engines.scripted import ScriptedEngine
from rstar2lab.nano.tokenizer import FileTokenizer
from rstar2lab.protocol import parse_turn, render_call
from rstar2lab.types import Problem, StopReason, ToolStatus

TAGS = [
    "<reason>", "</reason>", "<tool_call>", "</tool_call>", "<answer>", "</answer>",
    "<tool_response>", "</tool_response>", "<think>", "<|im_end|>", "<|im_start|>", "\\boxed{",
    "}", "{", '"name"', '"arguments"', '"code"', "\\u", "\\ud800", "\x00", "[", "NaN", "1e999",
]  # fmt: skip
VALID = [
    "<reason>Let me compute.</reason>" + render_call("print(6*7)"),
    "<reason>Two steps.</reason>" + render_call("boom") + render_call("print(2)", "5\n"),
    "<reason>a</reason><reason>b</reason>" + render_call("slow"),
    r"<reason>So it is 42.</reason><answer>The result is \boxed{42}.</answer>",
    r"<answer>\boxed{\frac{84}{2}}</answer> no: <answer>\boxed{041}</answer>",
]
ANSWER = r"<answer>\boxed{42}</answer>"


def random_texts(count: int, rng: random.Random):
    """Bytes as they come, read as UTF-8 and as Latin-1 in turn; a third has tags in between."""
    for number in range(count):
        raw = rng.randbytes(rng.choice((0, 1, 5, 20, 80, 200)))
        text = raw.decode("utf-8", "replace") if number % 2 else raw.decode("latin-1")
        if number % 3 == 0:
            cut = len(text) // 3
            parts = [text[:cut], text[cut : 2 * cut], text[2 * cut :]]
            text = "".join(p + "".join(rng.choices(TAGS, k=rng.randrange(4))) for p in parts)
        yield text


def mutated_texts(count: int, rng: random.Random):
    """Valid turns with one to three pieces deleted, doubled, moved, or replaced."""
    for _ in range(count):
        text = rng.choice(VALID)
        for _ in range(rng.randint(1, 3)):
            a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            a = max(a, b - rng.choice((1, 3, 12)))
            new = rng.choice(("", text[a:b] * 2, rng.choice(TAGS), rng.choice(VALID), "\n"))
            text = text[:a] + new + text[b:]
        yield text


STREAMS = {"random bytes": (random_texts, 100_000), "mutated turns": (mutated_texts, 10_000)}
SLICES = {"random bytes": 2_000, "mutated turns": 500}


def stream(name: str, count: int) -> list[str]:
    return list(STREAMS[name][0](count, random.Random(2508)))


def check_parsed(text: str) -> str:
    """One reading, and its kind."""
    parsed = parse_turn(text)
    assert parsed == parse_turn(text)
    for call in parsed.calls:
        assert (call.malformed is None) == (call.code is not None)
        assert call.raw in text
    extracted = rewards.extract_answer(text)
    assert extracted is None or extracted in parsed.answers[-1]
    if parsed.calls:
        return "malformed call" if parsed.calls[0].malformed else "call"
    return "answer" if parsed.answers else "neither"


def not_the_checker(prediction, gold):
    return rewards.Verdict(False, "parse_failure")


async def outcomes(texts, tokens) -> Counter:
    """Each text as the first turn of a rollout; an answer follows if the rollout goes on."""
    answer = tokens.encode(ANSWER) + [tokens.stop_id]
    chat = protocol.chat_format("nano", tools=True, response_chars=60)
    limits = rollouts.RolloutSettings(3, 2, 1500, 1.0, 1.0, "0/fuzz")
    problem, found = Problem("p", "6 * 7?", "42"), Counter()
    for text in texts:
        lines = [tokens.encode(text) + [tokens.stop_id], answer, answer]
        engine = ScriptedEngine(lambda request_id, lines=lines: lines)
        actors = rollouts.Actors(engine, FakeEnvironment(), tokens, chat)
        trajectory = await rollouts.rollout(problem, 0, actors, limits)
        trajectory = rollouts.score_or_void(trajectory, problem, not_the_checker)
        found[check_trajectory(trajectory)] += 1
    return found


def check_trajectory(trajectory) -> str:
    assert isinstance(trajectory.stop, StopReason) and trajectory.stop is not StopReason.VOID
    assert all(isinstance(result.status, ToolStatus) for _, result in trajectory.outcomes)
    assert trajectory.reward in (0.0, 1.0)
    assert trajectory.reason in (*get_args(rewards.Reason), "truncated")
    assert 0 <= roc.penalties(trajectory) <= 2
    assert trajectory.num_trained_tokens == sum(len(t.token_ids) for t in trajectory.turns)
    statuses = [result.status.name for _, result in trajectory.outcomes]
    return f"{trajectory.stop.name} {statuses[:1]}"


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory):
    folder = chats.tokenizer_folder(tmp_path_factory.mktemp("bytes"), None)
    return FileTokenizer(folder / "tokenizer.json")


def play(name: str, count: int, byte_tokens) -> None:
    texts = stream(name, count)
    kinds = Counter(map(check_parsed, texts))
    found = asyncio.run(outcomes(texts, byte_tokens))
    assert sum(found.values()) == sum(kinds.values()) == count
    assert {"neither", "malformed call"} <= set(kinds), kinds
    assert {"ANSWERED []", "ANSWERED ['MALFORMED']"} <= set(found), found


@pytest.mark.parametrize("name", STREAMS)
def test_a_slice_of_odd_texts_has_one_outcome_each(name, byte_tokens):
    play(name, SLICES[name], byte_tokens)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", STREAMS)
def test_all_odd_texts_have_one_outcome_each(name, byte_tokens):
    play(name, STREAMS[name][1], byte_tokens)


def test_mutated_turns_reach_every_outcome_that_a_call_can_have(byte_tokens):
    texts = VALID + ["<tool_call>{}</tool_call>", render_call("1", name="calculator")]
    found = asyncio.run(outcomes(texts, byte_tokens))
    assert set(found) == {
        "ANSWERED []", "ANSWERED ['OK']", "ANSWERED ['ERROR']", "ANSWERED ['TIMEOUT']",
        "ANSWERED ['MALFORMED']", "ANSWERED ['UNKNOWN_TOOL']",
    }  # fmt: skip


UNFRIENDLY = {
    "open reason": "<reason>",
    "open answer": "<answer>",
    "open call": "<tool_call>",
    "answers opened in turn": "<reason><answer>",
    "closings only": "</tool_call>",
    "empty calls": "<tool_call></tool_call>",
    "calls and thoughts": "<reason><tool_call></reason>",
    "answers in thoughts": "<reason></answer><answer></reason>",
    "less-than signs": "<",
    "half tags": "<tool_call",
}


@pytest.mark.parametrize("unit", UNFRIENDLY.values(), ids=UNFRIENDLY)
@pytest.mark.parametrize("ending", ["", "</reason>", "</answer>"])
def test_a_hundred_thousand_tags_are_read_in_seconds(unit, ending):
    """Linear in the text: a reader that searches on from every tag takes minutes here."""
    text = unit * 100_000 + ending
    started = time.process_time()
    parse_turn(text)
    assert time.process_time() - started < 5


MONSTERS = ['{"a":' * 50_000, "[" * 200_000, '"' + "\\" * 200_001, "9" * 200_000]


@pytest.mark.parametrize("body", MONSTERS, ids=["objects", "arrays", "backslashes", "digits"])
def test_a_monstrous_call_is_malformed_in_no_time(body):
    started = time.process_time()
    (call,) = parse_turn(f"<tool_call>{body}</tool_call>").calls
    assert call.malformed.startswith("invalid JSON") and time.process_time() - started < 1
