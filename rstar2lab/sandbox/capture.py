"""Output of a call, capped while it flows, in memory that no forked child inherits.

Standard output keeps its head, standard error its tail (where a traceback ends). The cap is in
characters; up to 4 bytes are kept for each, and the owner cuts exactly after decoding.
"""

import mmap
import os

_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that do not start a character
_CHUNK = 1 << 16
MAX_BYTES_PER_CHAR = 4


class Capture:
    """Reads one pipe. `chars` counts everything that came, `view()` is what is kept."""

    def __init__(self, output_chars: int, keeps_tail: bool):
        self.size = MAX_BYTES_PER_CHAR * output_chars + MAX_BYTES_PER_CHAR
        self.keeps_tail = keeps_tail
        self.memory = mmap.mmap(-1, self.size + _CHUNK)
        self.memory.madvise(mmap.MADV_DONTFORK)
        self.view_all = memoryview(self.memory)
        self.used = 0
        self.chars = 0
        self.is_cut = False

    def clear(self) -> None:
        """Forget everything, for the next call."""
        self.memory.madvise(mmap.MADV_DONTNEED)
        self.used, self.chars, self.is_cut = 0, 0, False

    def read(self, descriptor: int) -> bool:
        """Read what is there, at most one chunk. False at the end of the pipe.

        Raises: BlockingIOError when nothing is there.
        """
        count = os.readv(descriptor, [self.view_all[self.used : self.used + _CHUNK]])
        if count == 0:
            return False
        self.chars += self._count_chars(count)
        self.used += count
        if self.used > self.size:
            self._cut()
        return True

    def _count_chars(self, count: int) -> int:
        """Characters that start in the last `count` bytes; the copies are wiped."""
        if self.used + count <= self.size and not self.is_cut:
            return count  # bytes bound the characters, and precision matters only far above the cap
        copy = bytearray(self.view_all[self.used : self.used + count])
        starts = copy.translate(None, _CONTINUATION)
        size = len(starts)
        copy[:] = bytes(count)
        starts[:] = bytes(size)
        return size

    def _cut(self) -> None:
        self.is_cut = True
        if self.keeps_tail:
            start = self.used - self.size
            self.view_all[: self.size] = self.view_all[start : self.used]
        self.used = self.size

    def view(self) -> memoryview:
        """The kept bytes; valid until the next `clear`."""
        return self.view_all[: self.used]
