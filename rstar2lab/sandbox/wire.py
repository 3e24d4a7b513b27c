"""Messages between the owner and its worker processes, over Unix sockets.

A frame is a length, a JSON header and raw bytes; descriptors travel beside it. Program text and
standard input never pass through a worker's memory: they are handed over as descriptors.
"""

import json
import os
import socket
import struct
from collections.abc import Iterable

_PREFIX = struct.Struct("=I")
_MOST_DESCRIPTORS = 4


class Disconnected(ConnectionError):
    """The other side is gone, or sent no complete frame."""


def send(
    sock: socket.socket,
    header: dict,
    blobs: Iterable[memoryview] = (),
    descriptors: Iterable[int] = (),
) -> None:
    """Send one frame. Raises: OSError when the other side is gone."""
    text = json.dumps(header).encode()
    head = _PREFIX.pack(len(text)) + text
    if fds := list(descriptors):
        socket.send_fds(sock, [head], fds)
    else:
        sock.sendall(head)
    for blob in blobs:
        if len(blob):
            sock.sendall(blob)


def receive(sock: socket.socket) -> tuple[dict, list[int]]:
    """Receive one header and the descriptors beside it.

    Raises: Disconnected at the end of the stream.
    """
    first, fds, _, _ = socket.recv_fds(sock, _PREFIX.size, _MOST_DESCRIPTORS)
    if not first:
        raise Disconnected("end of stream")
    first += receive_bytes(sock, _PREFIX.size - len(first))
    (size,) = _PREFIX.unpack(first)
    return json.loads(receive_bytes(sock, size)), fds


def receive_bytes(sock: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. Raises: Disconnected at the end of the stream."""
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise Disconnected("end of stream")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def store(content: bytes, name: str) -> int:
    """An anonymous file that holds `content`, positioned at its start. Returns its descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def load(descriptor: int) -> bytes:
    """The whole content of a descriptor made by `store`, which is closed."""
    with open(descriptor, "rb") as file:
        return file.read()
