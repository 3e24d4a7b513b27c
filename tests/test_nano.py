"""The nano world: answers by brute force, the split, the corpus, the tokenizer, the model."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rstar2lab import config as cfg
from rstar2lab import protocol, sft
from rstar2lab.nano import corpus, model, tasks
from rstar2lab.sandbox import Sandbox
from rstar2lab.types import ToolResult, ToolStatus

PRINTABLE = "".join(chr(c) for c in range(32, 127)) + "\n"


# --- tasks: every family solved again, by another method -----------------------------------------


def remainder(a, b, c, m):
    return divmod(sum([a] * b) + c, m)[1]


def pens(a, b, c):
    return sum(b for _ in range(a)) - c


def greatest_divisor(a, b):
    return max(d for d in range(1, min(a, b) + 1) if a % d == b % d == 0)


def smallest_multiple(a, b):
    multiple = a
    while multiple % b:
        multiple += a
    return multiple


def power(a, b, m):
    result = 1
    for _ in range(b):
        result = result * a % m
    return result


def divisors(n):
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return set(small) | {n // d for d in small}


def digit_sum(a, b):
    rest, total = a**b, 0
    while rest:
        rest, digit = divmod(rest, 10)
        total += digit
    return total


def multiples(*numbers, text):
    k, a, b = numbers if text.startswith("What") else (numbers[2], *numbers[:2])
    first = -(-a // k) * k
    return sum(range(first, b + 1, k))


def primes_below(n):
    sieve = [True] * n
    for i in range(2, n):
        for j in range(i * i, n, i):
            sieve[j] = False
    return sum(sieve[2:])


SOLUTIONS = {
    "remainder": remainder,
    "pens": pens,
    "gcd": greatest_divisor,
    "lcm": smallest_multiple,
    "power": power,
    "divisor_sum": lambda n: sum(divisors(n)),
    "divisor_count": lambda n: len(divisors(n)),
    "digit_sum": digit_sum,
    "multiples": multiples,
    "primes": primes_below,
}


def solve_again(family: str, question: str) -> int:
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    more = {"text": question} if family == "multiples" else {}
    return SOLUTIONS[family](*numbers, **more)


def test_every_reference_answer_is_what_another_method_finds():
    families = set()
    for seed, held_out in ((0, False), (1, True)):
        for problem in tasks.problems(300, seed=seed, held_out=held_out):
            family = problem.source.removeprefix("nano/")
            assert int(problem.answer) == solve_again(family, problem.question), problem
            families.add(family)
    assert families == set(SOLUTIONS)


def test_a_misreading_gives_the_right_answer_only_by_accident():
    rng = np.random.default_rng(0)
    for family in tasks.FAMILIES:
        assert 3 <= len(family.plans) <= 5
        draws = [family.draw(rng) for _ in range(60)]
        for plan in range(1, len(family.plans)):
            same = sum(
                eval(family.expression(o, plan), {"math": __import__("math")})  # noqa: S307
                == tasks.solve(family, o)
                for o in draws
            )
            assert same <= 12, (family.name, family.plans[plan])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_held_out_question_is_ever_trained_on(seed):
    train = {p.question for p in tasks.problems(1000, seed=seed, held_out=False)}
    held_out = {p.question for s in range(3) for p in tasks.problems(200, seed=s, held_out=True)}
    assert len(train) == 1000 and not train & held_out


def test_one_question_in_ten_is_held_out():
    rng = np.random.default_rng(3)
    questions = {tasks.draw_instance(rng, f)[0] for f in tasks.FAMILIES for _ in range(400)}
    share = np.mean([tasks.is_held_out(q) for q in questions])
    assert abs(share - 26 / 256) < 4 * np.sqrt(0.1 * 0.9 / len(questions))


def test_problems_depend_on_the_seed_alone_and_families_have_equal_shares():
    first = tasks.problems(100, seed=4, held_out=False)
    assert first == tasks.problems(100, seed=4, held_out=False)
    assert first == tasks.problems(200, seed=4, held_out=False)[:100]
    assert first != tasks.problems(100, seed=5, held_out=False)
    sources = [p.source for p in first]
    assert all(sources.count(f"nano/{name}") == 10 for name in SOLUTIONS)
    assert {p.level for p in first} == {"easy", "hard"}
    assert len({p.id for p in first}) == len({p.question for p in first}) == 100


@pytest.mark.parametrize("level", ["easy", "hard"])
def test_problems_of_one_level_come_from_its_five_families_in_equal_shares(level):
    found = tasks.problems(50, seed=4, held_out=False, level=level)
    assert {p.level for p in found} == {level}
    assert sorted(Counter(p.source for p in found).values()) == [10] * 5


def test_asking_for_more_questions_than_exist_is_refused():
    with pytest.raises(cfg.ConfigError, match="lower problems.held_out"):
        tasks.problems(2000, seed=0, held_out=True)


# --- the corpus ----------------------------------------------------------------------------------


WITH_TOOL, NO_TOOL = (
    protocol.chat_format("nano", tools=t, response_chars=60) for t in (True, False)
)
RATES = corpus.CorpusRates()


@pytest.fixture(scope="module")
def executed() -> list[corpus.Dialogue]:
    with Sandbox(workers=2) as sandbox:
        return corpus.build(300, seed=0, rates=RATES, execute=sandbox.run_many)


def rendered(dialogues) -> list[list[corpus.Segment]]:
    return [corpus.render(dialogue, WITH_TOOL, NO_TOOL) for dialogue in dialogues]


def drawn(count: int, **rates) -> list[corpus.Dialogue]:
    rng = np.random.default_rng(1)
    rates = corpus.CorpusRates(**({"no_tool": 0.0} | rates))
    return [corpus.draw_dialogue(rng, rates) for _ in range(count)]


def assert_share(found, expected, count):
    assert abs(found / count - expected) < 4 * np.sqrt(expected * (1 - expected) / count)


def test_the_final_answer_is_what_the_tool_printed_last(executed):
    for dialogue, segments in zip(executed, rendered(executed), strict=True):
        box = re.findall(r"<answer>\\boxed\{(.*?)\}</answer>", segments[-1].text)
        said = [s.text for s in segments if s.from_tool]
        expected = said[-1] if said else dialogue.value
        assert box == [expected] * (2 if dialogue.second_answer else 1)
        assert re.fullmatch(r"-?\d+", expected)


def test_every_program_was_really_run(executed):
    calls = [call for d in executed for call in d.calls if not call.broken]
    with Sandbox(workers=2) as sandbox:
        again = sandbox.run_many([call.code for call in calls[:60]])
    for call, result in zip(calls, again, strict=False):
        assert (call.result.status, call.result.stdout) == (result.status, result.stdout)
    statuses = {call.result.status for call in calls}
    assert statuses == {ToolStatus.OK, ToolStatus.ERROR}


def test_all_but_the_first_tries_of_a_dialogue_work(executed):
    """The call before the answer and every verification succeed; failures come first."""
    for dialogue in executed:
        failed = [c.broken or c.result.status is not ToolStatus.OK for c in dialogue.calls]
        assert not failed or not failed[-1]


def test_broken_calls_are_malformed_and_the_others_hold_their_program(executed):
    broken = 0
    for dialogue, segments in zip(executed, rendered(executed), strict=True):
        turns = [s.text for s in segments if s.trained]
        for call, turn in zip(dialogue.calls, turns, strict=False):
            (parsed,) = protocol.parse_turn(turn).calls
            assert (parsed.malformed is not None) == call.broken
            assert call.broken or parsed.code == call.code
            broken += call.broken
    assert broken > 5


def test_every_trained_span_is_an_assistant_turn_that_ends_with_the_stop_token(executed, tokens):
    for segments in rendered(executed[:80]):
        found = sft.encode(segments, WITH_TOOL, tokens)
        text = ""
        for start, end in spans(found.trained):
            assert found.ids[end - 1] == tokens.stop_id
            assert tokens.stop_id not in found.ids[start : end - 1]
            text += tokens.decode(found.ids[start:end])
        assert text == tokens.decode(tokens.encode("".join(s.text for s in segments if s.trained)))
        assert len(spans(found.trained)) == 1 + sum(s.from_tool for s in segments)


def spans(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.r_[0, mask.astype(int), 0]))
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_training_tokens_are_those_that_a_rollout_would_have_produced(executed, tokens):
    """The dialogue encoded for training = prompt + turn + tool response + turn, as at sampling."""
    segments = next(
        s for d, s in zip(executed, rendered(executed), strict=True) if len(d.calls) == 2
    )
    expected = tokens.encode(segments[0].text)
    for segment in segments[1:]:
        expected += (
            protocol.encode_response(segment.text, WITH_TOOL, tokens)
            if segment.from_tool
            else tokens.encode(segment.text)
        )
    assert sft.encode(segments, WITH_TOOL, tokens).ids.tolist() == expected


def test_no_dialogue_is_about_a_held_out_question():
    assert not any(tasks.is_held_out(d.question) for d in drawn(500))


def test_the_right_plan_is_drawn_as_often_as_its_rate_says():
    """Right answers without a tool: the rate, and the few accidents of wrong plans."""
    found = {"easy": [], "hard": []}
    by_wording = {
        re.sub(r"\d+", "#", wording.format_map(dict.fromkeys("abcmkn", 1))): family
        for family in tasks.FAMILIES
        for wording in family.wordings
    }
    for dialogue in drawn(3000, no_tool=1.0):
        family = by_wording[re.sub(r"\d+", "#", dialogue.question)]
        right = int(dialogue.value) == solve_again(family.name, dialogue.question)
        found[family.level].append(right)
    assert 0.26 < np.mean(found["easy"]) < 0.38
    assert 0.10 < np.mean(found["hard"]) < 0.22


def test_failures_verifications_and_second_answers_come_at_their_rates():
    dialogues = drawn(4000)
    failed_first = sum(
        len(d.calls) > 1 and d.calls[1].thought in corpus.REFLECTIONS for d in dialogues
    )
    assert_share(failed_first, RATES.bad_first_call, 4000)
    assert_share(sum(d.second_answer for d in dialogues), RATES.second_answer, 4000)
    verified = sum(any(c.thought in corpus.VERIFICATIONS for c in d.calls) for d in dialogues)
    assert_share(verified, RATES.verify, 4000)
    assert_share(sum(not d.calls for d in drawn(4000, no_tool=0.2)), 0.2, 4000)


def test_every_dialogue_opens_its_reasoning_in_one_of_the_openers_equally_often():
    dialogues = drawn(4000)
    for opener in corpus.OPENERS:
        assert_share(sum(d.calls[0].thought == opener for d in dialogues), 1 / 5, 4000)


def test_the_corpus_depends_on_its_seed_alone():
    def execute(programs):
        return [ToolResult(ToolStatus.OK, f"{len(p)}\n") for p in programs]

    first, again, other = (
        rendered(corpus.build(50, seed=s, rates=RATES, execute=execute)) for s in (7, 7, 8)
    )
    assert first == again != other


# --- the tokenizer -------------------------------------------------------------------------------


@given(st.text(PRINTABLE, max_size=200))
def test_decoding_undoes_encoding(tokens, text):
    assert tokens.decode(tokens.encode(text, special=False)) == text
    assert tokens.decode(tokens.encode(text)) == text


def test_a_dialogue_of_the_corpus_survives_encoding(executed, tokens):
    for segments in rendered(executed[:40]):
        text = "".join(s.text for s in segments)
        assert tokens.decode(tokens.encode(text)) == text


def test_numbers_are_cut_into_chunks_of_two_digits_from_the_left(tokens):
    def pieces(text):
        return [tokens.decode([i]) for i in tokens.encode(text)]

    assert pieces("12345") == ["12", "34", "5"]
    assert pieces("007") == ["00", "7"]
    assert pieces("7*10") == ["7", "*", "10"]


def test_a_call_costs_few_tokens_around_its_code(tokens):
    empty = len(tokens.encode(protocol.render_call("")))
    assert empty <= 4 and len(tokens.encode(protocol.render_call("1"))) == empty + 1


def test_a_tokenizer_without_the_stop_token_is_refused(tokens):
    from rstar2lab.nano.tokenizer import FileTokenizer

    with pytest.raises(ValueError, match="no token '<eos>'; name the model's stop token"):
        FileTokenizer(tokens.path, stop_token="<eos>")


# --- the model -----------------------------------------------------------------------------------


def test_the_checkpoint_is_a_plain_qwen3_that_transformers_loads_without_custom_code(cold_model):
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    net = AutoModelForCausalLM.from_pretrained(cold_model)
    assert type(net) is Qwen3ForCausalLM
    config = json.loads((cold_model / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and "auto_map" not in config
    assert config["tie_word_embeddings"] is True
    assert net.lm_head.weight.data_ptr() == net.model.embed_tokens.weight.data_ptr()


def test_the_head_width_is_one_that_vllm_s_cpu_attention_supports():
    net = model.build(cfg.Model(), 100, 0)
    assert net.config.head_dim == 32 and net.config.rope_parameters["rope_theta"] == 200.0
    assert 0.2e6 < net.num_parameters() < 0.6e6


def test_auto_tokenizer_gives_the_kit_s_ids_and_the_stop_token(cold_model, executed):
    from transformers import AutoTokenizer

    from rstar2lab.nano.tokenizer import FileTokenizer

    auto, ours = (
        AutoTokenizer.from_pretrained(cold_model),
        FileTokenizer(cold_model / "tokenizer.json"),
    )
    assert auto.eos_token_id == ours.stop_id and len(auto) == ours.vocabulary_size
    for segments in rendered(executed[:30]):
        text = "".join(s.text for s in segments)
        ids = ours.encode(text)
        assert auto(text, add_special_tokens=False).input_ids == ids
        assert auto.decode(ids) == text


def test_weights_depend_on_the_seed_and_survive_saving(tmp_path, tokens):
    nets = [model.build(cfg.Model(), tokens.vocabulary_size, seed) for seed in (0, 0, 1)]
    weights = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    model.save(nets[0], tokens.path.parent, tmp_path / "saved")
    loaded = model.load(tmp_path / "saved")
    assert torch.equal(torch.cat([p.detach().flatten() for p in loaded.parameters()]), weights[0])
    assert (tmp_path / "saved" / "tokenizer.json").exists()
