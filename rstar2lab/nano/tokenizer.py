"""A closed vocabulary for the nano world: words, ASCII characters, two-digit number chunks.

Single digits would learn the format perfectly and never copy an operand; two-digit chunks copy.
Every tag of the protocol is one special token, and so are the fixed JSON before and after the code
of a call, so that a dialogue has about 90 tokens. The result is a plain `tokenizers` file, which
transformers and vLLM load as it is.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from .. import protocol

_CODE = "CODE"
_BEFORE_CODE, _AFTER_CODE = protocol.render_call(_CODE).split(_CODE)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    protocol.STOP_TOKEN,
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "<reason>",
    "</reason>",
    "<answer>",
    "</answer>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    _BEFORE_CODE,
    _AFTER_CODE,
)
_SPLIT = r"\\boxed\{|\\n| = | ?[A-Za-z_]+(?:\.[A-Za-z_]+)*\(?|[0-9]{1,2}|\*\*|==|//|.|\n"
_CHARACTERS = [c for c in string.printable if c not in "\t\r\x0b\x0c"]


def train(texts: Iterable[str], *, min_count: int = 10) -> Tokenizer:
    """Vocabulary: special tokens, ASCII, numbers 0–99 and 00–09, words seen `min_count` times."""
    specials = re.compile("|".join(re.escape(t) for t in sorted(SPECIAL_TOKENS, key=len)[::-1]))
    counts = Counter(
        piece
        for text in texts
        for part in specials.split(text)
        for piece in re.findall(_SPLIT, part)
    )
    chunks = [f"{n:02d}" for n in range(100)]
    words = sorted(w for w, n in counts.items() if n >= min_count and w.isascii())
    pieces = dict.fromkeys([*SPECIAL_TOKENS, "<unk>", *_CHARACTERS, *chunks, *words])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.WordPiece(
            vocabulary,
            unk_token="<unk>",
            continuing_subword_prefix="",
            max_input_chars_per_word=100_000,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    return tokenizer


class FileTokenizer:
    """The kit's `protocol.Tokenizer` over a `tokenizer.json`: nano's, or any other.

    Raises: ValueError if the file does not know the stop token as one token.
    """

    def __init__(self, path: str | Path, stop_token: str = protocol.STOP_TOKEN):
        self.path = Path(path)
        parts = json.loads(self.path.read_text(encoding="utf-8"))
        self._special = Tokenizer.from_str(json.dumps(parts))
        added, parts["added_tokens"] = parts["added_tokens"], []
        self._plain = Tokenizer.from_str(json.dumps(parts))  # tags are ordinary characters
        unknown = parts["model"].get("unk_token")
        self._tags = {
            token["content"]: token["id"]
            for token in added
            if len(token["content"]) > 1 and token["content"] != unknown
        }
        inside = (f"(?<={re.escape(tag[0])})(?={re.escape(tag[1:])})" for tag in self._tags)
        self._inside_tag = re.compile("|".join(inside) or "(?!)")
        stop_id = self._special.token_to_id(stop_token)
        if stop_id is None:
            raise ValueError(f"{path} has no token {stop_token!r}; name the model's stop token")
        self.stop_id: int = stop_id

    @property
    def vocabulary_size(self) -> int:
        return self._special.get_vocab_size()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids. `special=False`: no added token, though the text may spell one.

        Tokenizers know `<tool_response>` and the like often as *non-special* added tokens, which
        their own switch for special tokens leaves in. A vocabulary that holds a tag itself gets the
        text in pieces, cut inside the tag.
        """
        if special:
            return self._special.encode(text, add_special_tokens=False).ids
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not set(ids).isdisjoint(self._tags.values()):
            pieces = self._inside_tag.split(text)
            ids = [i for p in pieces for i in self._plain.encode(p, add_special_tokens=False).ids]
        return ids

    def decode(self, token_ids) -> str:
        return self._special.decode([int(i) for i in token_ids], skip_special_tokens=False)
