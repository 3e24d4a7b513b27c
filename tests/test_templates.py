"""Chat templates of models: which are taken, which are refused and why, and what a rollout sees."""

import asyncio
import shutil
from dataclasses import replace

import chats
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import FakeEnvironment, tiny_config

from rstar2lab import cli, protocol, templates
from rstar2lab import config as cfg
from rstar2lab import rollout as rollouts
from rstar2lab.engines.scripted import ScriptedEngine
from rstar2lab.nano.tokenizer import FileTokenizer
from rstar2lab.protocol import render_call
from rstar2lab.templates import TemplateError
from rstar2lab.types import Problem, StopReason


def template(jinja: str) -> templates.Template:
    return templates.Template("mine", jinja, {}, chats.SPECIAL + chats.ADDED)


def verdicts(jinja: str, **named) -> dict[str, tuple[str, str]]:
    return {f.name: (f.verdict, f.found) for f in templates.check(template(jinja), **named)}


def chat_of(jinja: str, tools: bool = True) -> protocol.ChatFormat:
    return templates.chat_format(template(jinja), tools=tools, response_chars=200)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jinja", "check", "reason"),
    [
        (chats.STRIPS_REASONING, "append-only", "reasoning of an earlier turn is stripped"),
        (chats.ADDS_EMPTY_THINK, "append-only", "an empty <think></think> is added"),
        (chats.ALTERS_TURNS, "append-only", "stood 'reason>I count"),
        (chats.NEXT_MESSAGE_ENDS_THE_TURN, "stop token", "belongs to the next message"),
        (chats.ENDS_WITHOUT_A_TOKEN, "stop token", "does not begin with a token of its own"),
        (chats.OPENS_NOTHING, "generation prompt", "adds nothing"),
        (chats.ASKS_TWICE, "question", "shown 2 times"),
        (chats.MARKED_WITHOUT_STOP, "generation markers", "stopping is never trained"),
        (chats.MARKED_EVERYWHERE, "generation markers", "mark everything"),
        (chats.MARKED_ONCE, "generation markers", "mark 1 spans where 2 turns are"),
        ("{{- raise_exception('no')", "template", "TemplateSyntaxError"),
        ("{{- raise_exception('not for you') }}", "template", "not for you"),
        ("always the same", "tool response", "neither from the role tool"),
    ],
)
def test_a_template_that_is_unfit_is_refused_with_the_reason(jinja, check, reason):
    verdict, found = verdicts(jinja)[check]
    assert verdict == "FAIL" and reason in found
    with pytest.raises(TemplateError, match="mine: the chat template is refused") as caught:
        chat_of(jinja)
    assert f"{check}: " in str(caught.value) and reason in str(caught.value)


def test_reasoning_that_only_a_new_question_strips_is_a_note():
    found = verdicts(chats.STRIPS_AT_A_NEW_QUESTION)
    assert found["append-only"][0] == "ok"
    assert found["second question"][0] == "note" and "stripped" in found["second question"][1]


def test_without_generation_markers_a_rollout_works_and_a_mask_is_refused():
    assert verdicts(chats.APPEND_ONLY)["generation markers"][0] == "note"
    dialogue = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(TemplateError, match="generation markers are missing"):
        template(chats.APPEND_ONLY).marked_spans(dialogue)
    with pytest.raises(TemplateError, match="generation markers mark nothing"):
        template(chats.MARKED).marked_spans(dialogue[:1])


def test_markers_that_hold_more_than_a_turn_are_a_note():
    """Several published templates mark the line break after the stop token too."""
    verdict, found = verdicts(chats.MARKED_BEYOND)["generation markers"]
    assert verdict == "note" and "'' before a turn, '\\n' after it" in found


def test_a_tool_role_that_writes_json_gives_way_to_a_user_message():
    chat = chat_of(chats.TOOL_AS_JSON)
    assert chat.frame.before_response == "\n<|im_start|>user\n<tool_response>\n"


def test_with_markers_the_last_marked_token_of_every_turn_is_the_stop_token():
    assert verdicts(chats.MARKED)["generation markers"][0] == "ok"
    turn = {"role": "assistant", "content": "a"}
    dialogue = [{"role": "user", "content": "q"}, turn, {"role": "tool", "content": "r"}, turn]
    text, spans = template(chats.MARKED).marked_spans(dialogue)
    assert [text[start:end] for start, end in spans] == ["a<|im_end|>"] * 2


# --- what is read off -----------------------------------------------------------------------------


def test_the_frame_of_chatml_is_the_one_that_the_kit_writes_itself():
    chat = chat_of(chats.APPEND_ONLY)
    frame = protocol.Frame()
    assert chat.frame.after_question == frame.after_question
    assert chat.frame.before_response == frame.before_response + "\n"
    assert chat.frame.after_response == "\n" + frame.after_response
    assert (chat.frame.stop_token, chat.first_prefix) == ("<|im_end|>", "")


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize("jinja", [chats.APPEND_ONLY, chats.FORCES_A_TAG, chats.PLAIN_TURNS])
def test_the_prompt_says_once_how_to_answer_and_what_the_tool_is(jinja, tools):
    prompt = chat_of(jinja, tools).prompt("What is {x}?")
    assert prompt.count("What is {x}?") == 1 and "<answer>" in prompt
    assert prompt.count(f'"name": "{protocol.TOOL_NAME}"') == tools
    assert ("<tools>" in prompt) == ("<tool_call>" in prompt) == tools


def test_what_the_template_does_not_say_the_kit_says():
    bare, own = (verdicts(jinja) for jinja in (chats.PLAIN_TURNS, chats.FORCES_A_TAG))
    assert bare["tools"][0] == "note" and "by the kit" in bare["tools"][1]
    assert own["tools"] == ("ok", "described by the template")
    assert "by the template" in own["instruction"][1] and "by the kit" in bare["instruction"][1]


@pytest.mark.parametrize(
    ("jinja", "prefix"), [(chats.FORCES_A_TAG, "<reason>"), (chats.FORCES_THINKING, "<think>\n")]
)
def test_a_forced_tag_is_the_prefix_of_every_turn_and_prompt(jinja, prefix):
    chat = chat_of(jinja)
    assert chat.first_prefix == chat.next_prefix == prefix
    assert chat.prompt("q").endswith(f"<|im_start|>assistant\n{prefix}")
    assert not chat.frame.after_response.endswith(prefix)


# --- what a rollout sees --------------------------------------------------------------------------

FIT = {
    "append-only": chats.APPEND_ONLY,
    "marked": chats.MARKED,
    "forces a tag": chats.FORCES_A_TAG,
    "forces thinking": chats.FORCES_THINKING,
    "plain turns": chats.PLAIN_TURNS,
    "strips at a new question": chats.STRIPS_AT_A_NEW_QUESTION,
}
LIMITS = rollouts.RolloutSettings(
    max_turns=5, max_calls_per_turn=1, max_response_tokens=4000, temperature=1.0, top_p=1.0,
    seed_key="0/test",
)  # fmt: skip


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory):
    folder = chats.tokenizer_folder(tmp_path_factory.mktemp("bytes"), None)
    return FileTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("jinja", FIT.values(), ids=FIT)
def test_a_rollout_s_tokens_are_those_of_the_template_s_own_rendering(jinja, byte_tokens):
    """Token by token: what was sampled and appended equals the whole dialogue rendered at once."""
    played = templates._examine(template(jinja), True)[1]
    texts = [text for text, is_tool in played.pieces if not is_tool]
    lines = [byte_tokens.encode(text) for text in texts[1::3]] + [[byte_tokens.stop_id]]
    chat = replace(played.chat, response_chars=200)
    engine = ScriptedEngine(lambda request_id: lines)
    actors = rollouts.Actors(engine, FakeEnvironment(), byte_tokens, chat)
    question = templates._QUESTION
    trajectory = asyncio.run(rollouts.rollout(Problem("p", question, "1"), 0, actors, LIMITS))
    expected = played.text
    for (_, response), turn in zip(templates._PROGRAMS, trajectory.turns, strict=False):
        printed = turn.result.stdout.rstrip("\n")
        expected = expected.replace(f"{chat.frame.before_response}{response}",
                                    f"{chat.frame.before_response}{printed}")  # fmt: skip
    found = np.r_[trajectory.prompt_ids, trajectory.response_ids].tolist()
    assert found == byte_tokens.encode(expected) + [byte_tokens.stop_id]
    assert trajectory.num_trained_tokens == sum(map(len, lines))
    assert trajectory.num_calls == 2 and trajectory.stop is StopReason.ANSWERED
    ends = [turn.token_ids[-1] for turn in trajectory.turns]
    assert ends == [byte_tokens.stop_id] * 3


# --- the tokens of a tool's text ------------------------------------------------------------------

texts_of_tags = st.lists(
    st.one_of(st.sampled_from(chats.SPECIAL + chats.ADDED + ("<", "/", ">")), st.text(max_size=4))
).map("".join)


@given(texts_of_tags)
def test_a_tool_s_text_has_no_added_token_special_or_not_and_comes_back(byte_tokens, text):
    ids = byte_tokens.encode(text, special=False)
    assert not set(ids) & {byte_tokens.encode(tag)[0] for tag in chats.SPECIAL + chats.ADDED}
    assert byte_tokens.decode(ids) == text


def test_added_tokens_that_are_not_special_are_among_them(byte_tokens):
    for tag in chats.SPECIAL + chats.ADDED:
        assert len(byte_tokens.encode(tag)) == 1
        assert len(byte_tokens.encode(tag, special=False)) == len(tag)


@given(st.lists(st.sampled_from(["</s>", "<", "/s>", "s", " x"])).map("".join))
def test_a_vocabulary_that_holds_a_tag_does_not_give_it_to_a_tool(tagged, text):
    assert tagged.encode("</s>") == [tagged.stop_id]
    ids = tagged.encode(text, special=False)
    assert tagged.stop_id not in ids


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    path = tmp_path_factory.mktemp("tagged") / "tokenizer.json"
    path.write_text(chats.tag_vocabulary().to_str())
    return FileTokenizer(path, stop_token="</s>")


def test_a_stop_token_that_the_tokenizer_does_not_know_is_refused(tmp_path):
    folder = chats.tokenizer_folder(tmp_path, None)
    with pytest.raises(ValueError, match="has no token '</s>'"):
        FileTokenizer(folder / "tokenizer.json", stop_token="</s>")


# --- folders, the configuration, the command ------------------------------------------------------


def test_a_template_is_read_from_its_file_or_from_the_configuration(tmp_path):
    folder = chats.tokenizer_folder(tmp_path / "own file", chats.APPEND_ONLY)
    found = templates.load(folder)
    assert found.jinja == chats.APPEND_ONLY
    assert found.special_tokens["pad_token"] == "<|endoftext|>"
    assert set(found.added_tokens) == set(chats.SPECIAL + chats.ADDED)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    for value, expected in (("z", "z"), (named, "y")):
        config = folder / "tokenizer_config.json"
        config.write_text(cfg.json.dumps({"chat_template": value}))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        assert templates.load(folder).jinja == expected


@pytest.mark.parametrize(
    ("name", "message"), [("empty", "no tokenizer.json"), ("without", "no chat template")]
)
def test_a_folder_without_a_template_or_tokenizer_says_so(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    chats.tokenizer_folder(tmp_path / "without", None)
    with pytest.raises(TemplateError, match=message):
        templates.load(tmp_path / name)


def test_a_name_that_is_not_in_the_cache_is_told_without_a_download():
    with pytest.raises(TemplateError, match="nobody/nothing: no tokenizer.json"):
        templates.load("nobody/nothing")


def test_a_tokenizer_that_changes_text_at_the_borders_is_refused(tmp_path):
    tokenizer = chats.byte_tokenizer()
    tokenizer.pre_tokenizer = chats.pre_tokenizers.ByteLevel(add_prefix_space=True)
    folder = chats.tokenizer_folder(tmp_path, chats.APPEND_ONLY, tokenizer)
    found = {f.name: f for f in templates.check(templates.load(folder))}
    assert found["tokens"].verdict == "FAIL" and "does not come back" in found["tokens"].found


def test_a_cold_start_has_no_template_of_its_own():
    with pytest.raises(cfg.ConfigError, match="a cold start has none; set model.source"):
        tiny_config(chat__style="template")


def test_a_checkpoint_with_a_template_is_driven_by_it(cold_model, tmp_path):
    from rstar2lab.workbench import Workbench

    folder = tmp_path / "model"
    shutil.copytree(cold_model, folder)
    (folder / "chat_template.jinja").write_text(chats.APPEND_ONLY)
    small = {"rollout__max_response_tokens": 40, "model__max_tokens": 2048}
    config = tiny_config(chat__style="template", model__source=str(folder), **small)
    with Workbench(config, folder) as bench:
        chat = bench.actors.chat
        assert chat.frame.stop_token == "<|im_end|>" and protocol.TOOL_NAME in chat.prompt("1 + 1?")
        group = bench.rollout(bench.train_problems[:1], 2, "train/1")[0]
    assert all(len(t.response_ids) for t in group.trajectories)
    (folder / "chat_template.jinja").write_text(chats.STRIPS_REASONING)
    with pytest.raises(TemplateError, match="is stripped"):
        Workbench(config, folder)


@pytest.mark.parametrize(
    ("jinja", "code", "line"),
    [
        (chats.APPEND_ONLY, None, "ok    stop token         '<|im_end|>', inside the turn"),
        (chats.STRIPS_REASONING, 1, "FAIL  append-only"),
        (None, 1, "FAIL  template"),
    ],
)
def test_the_doctor_prints_the_check_of_a_template(tmp_path, capsys, jinja, code, line):
    folder = chats.tokenizer_folder(tmp_path, jinja)
    try:
        cli.doctor(template=str(folder))
        left = None
    except SystemExit as exit_:
        left = exit_.code
    assert left == code and line in capsys.readouterr().out


def test_a_call_in_a_turn_that_begins_with_a_forced_tag_is_read_with_the_tag(byte_tokens):
    chat = chat_of(chats.FORCES_A_TAG)
    draft = f"I could {render_call('print(1)')}</reason>no call<|im_end|>"
    engine = ScriptedEngine(lambda request_id: [byte_tokens.encode(draft)])
    actors = rollouts.Actors(engine, FakeEnvironment(), byte_tokens, chat)
    trajectory = asyncio.run(rollouts.rollout(Problem("p", "q", "1"), 0, actors, LIMITS))
    assert trajectory.num_calls == 0 and trajectory.stop is StopReason.ANSWERED
