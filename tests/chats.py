"""Chat templates in the small, and byte-level tokenizers to go with them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
         "</tool_response>")  # fmt: skip

_TOOLS = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
  {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
  {{- '\\n</tools>\\nWrite <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_CALLS = """
    {%- for call in message.tool_calls or [] %}
      {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
"""
_TOOL_TURN = """
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
    {{- '\\n</tool_response><|im_end|>\\n' }}
"""
_USER_TURN = """
  {%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
"""
_OPENED = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"


def chatml(assistant: str, opened: str = _OPENED, user: str = _USER_TURN) -> str:
    """A ChatML template with its own words for an assistant's message."""
    turns = f"{user}{{%- elif message.role == 'assistant' %}}{assistant}{_TOOL_TURN}{{%- endif %}}"
    return f"{_TOOLS}{{%- for message in messages %}}{turns}{{%- endfor %}}{opened}"


_HEADER = "{{- '<|im_start|>assistant\\n' }}"
_CONTENT = "{{- message.content }}" + _CALLS
_END = "{{- '<|im_end|>' }}{{- '\\n' }}"
APPEND_ONLY = chatml(_HEADER + _CONTENT + _END)
MARKED = chatml(
    _HEADER + "{%- generation %}" + _CONTENT + "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
)
MARKED_WITHOUT_STOP = chatml(
    _HEADER + "{%- generation %}" + _CONTENT + "{%- endgeneration %}" + _END
)
MARKED_BEYOND = chatml(
    _HEADER + "{%- generation %}" + _CONTENT + _END + "{%- endgeneration %}"
)
MARKED_ONCE = chatml(
    _HEADER
    + "{%- if loop.index < 5 %}{%- generation %}"
    + _CONTENT
    + "{{- '<|im_end|>' }}{%- endgeneration %}{%- else %}"
    + _CONTENT
    + "{{- '<|im_end|>' }}{%- endif %}{{- '\\n' }}"
)
MARKED_EVERYWHERE = "{%- generation %}" + APPEND_ONLY + "{%- endgeneration %}"
STRIPS_REASONING = chatml(
    _HEADER
    + "{%- if '</think>' in message.content and not loop.last %}"
    + "{{- message.content.split('</think>')[-1].lstrip('\\n') }}{%- else %}"
    + "{{- message.content }}{%- endif %}"
    + _END
)
STRIPS_AT_A_NEW_QUESTION = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + chatml(
        _HEADER
        + "{%- if loop.index0 > ns.last %}{{- message.content }}{%- else %}"
        + "{{- message.content.split('</reason>')[-1] }}{%- endif %}"
        + _CALLS
        + _END
    )
)
ADDS_EMPTY_THINK = chatml(
    _HEADER
    + "{%- if loop.last and '<think>' not in message.content %}"
    + "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    + _CONTENT
    + _END
)
NEXT_MESSAGE_ENDS_THE_TURN = """
{%- for message in messages %}{%- if not loop.first %}{{- '<|im_end|>\\n' }}{%- endif %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{{- message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_end|>\\n<|im_start|>assistant\\n' }}{%- endif %}
"""
OPENS_NOTHING = chatml(_HEADER + _CONTENT + _END, opened="")
ENDS_WITHOUT_A_TOKEN = chatml(_HEADER + _CONTENT + "{{- '\\n\\n' }}")
ALTERS_TURNS = chatml(_HEADER + "{{- message.content | upper }}" + _END)
ASKS_TWICE = chatml(
    _HEADER + _CONTENT + _END,
    user="{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content "
    "+ message.content + '<|im_end|>\\n' }}",
)
# like the released one: it forces a tag, carries the instruction, and repeats it in turns as text
FORCES_A_TAG = chatml(
    _HEADER
    + "{%- if not message.tool_calls %}{{- 'Use <answer>.\\n' }}{%- endif %}"
    + _CONTENT
    + _END,
    opened="{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<reason>' }}{%- endif %}",
    user="{%- if message.role == 'user' %}"
    "{{- '<|im_start|>user\\nUse <answer>.\\n' + message.content + '<|im_end|>\\n' }}",
)
FORCES_THINKING = chatml(
    _HEADER + _CONTENT + _END,
    opened="{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}",
)
# the role "tool" writes JSON: a response of two lines becomes one
TOOL_AS_JSON = APPEND_ONLY.replace(
    "<tool_response>\\n' + message.content", "<tool_response>\\n' + (message.content | tojson)"
)
# no system message, no tools, no role "tool", another call form; turns must alternate
PLAIN_TURNS = """
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def byte_tokenizer(special=SPECIAL, added=ADDED) -> Tokenizer:
    """One token per byte, as in the published byte-level vocabularies, and the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    return tokenizer


def tag_vocabulary() -> Tokenizer:
    """A vocabulary that holds a tag as an ordinary entry, and takes it whole."""
    pieces = ["<unk>", "</s>", *(chr(i) for i in range(32, 127))]
    model = models.WordPiece(
        {p: i for i, p in enumerate(pieces)}, unk_token="<unk>", continuing_subword_prefix=""
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def tokenizer_folder(folder: Path, jinja: str | None, tokenizer: Tokenizer | None = None) -> Path:
    """A folder as `save_pretrained` leaves it: tokenizer, its configuration, the template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text((tokenizer or byte_tokenizer()).to_str())
    config = {"eos_token": "<|endoftext|>", "pad_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder
