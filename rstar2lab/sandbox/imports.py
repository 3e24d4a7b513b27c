"""Which modules a program will import, guessed from its text; a wrong guess is only slow.

Programs of other trainers come wrapped: their text is base64 in a literal that is decoded and
executed. Those literals are looked into as well.
"""

import base64
import binascii
import re

_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))", re.MULTILINE)
_LITERAL = re.compile(r"""["']([A-Za-z0-9+/=\\\n]{24,})["']""")


def imported(code: str) -> set[str]:
    """Top-level names that the program imports."""
    return _imported(code).union(*(_imported(text) for text in _decoded(code)))


def _imported(code: str) -> set[str]:
    found = set()
    for source, names in _IMPORT.findall(code):
        for part in (source or names).split(","):
            words = part.split()
            if words:
                found.add(words[0].partition(".")[0])
    return found


def _decoded(code: str) -> list[str]:
    """Texts inside base64 literals."""
    texts = []
    for literal in _LITERAL.findall(code):
        try:
            content = base64.b64decode(literal.replace("\\n", "").replace("\n", ""), validate=True)
            texts.append(content.decode())
        except (binascii.Error, UnicodeDecodeError, ValueError):
            continue
    return texts
