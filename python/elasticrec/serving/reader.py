"""The reader process of a version: receives lines and sends batches over its standard input, a socket.

`readers.py` starts it as `python -m elasticrec.serving.reader`; it ends when the socket is closed. The frames are
defined in `crates/serve/src/queue/readers.rs`.
"""

import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading

from elasticrec import _core
from elasticrec.data.reader_worker import read_frame
from elasticrec.errors import SampleError
from elasticrec.serving.reader_source import ReaderSource

LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<BI")
BATCH, REFUSED = 0, 1
# Longest error message; the server truncates it further.
_MESSAGE_BYTES = 4096


def encode_batch(batch: _core.Batch) -> bytes:
    """Encode a batch for the scorers: counts, signs, offsets and dense values, all little-endian."""
    signs, offsets = batch.signs, batch.offsets
    head = struct.pack("<II", batch.num_samples, len(signs))
    arrays = (signs.astype("<u8"), offsets.astype("<u4"), batch.dense.astype("<f4"))
    return head + b"".join(array.tobytes() for array in arrays)


def main() -> None:
    """Answer requests until the server closes the socket."""
    # Ignore signals: the server ends this process after it has answered all accepted requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=os.dup(0))
    # Replace standard input, so that custom code cannot read frames from it.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threading.Thread(target=_exit_with, args=(link,), daemon=True).start()
    try:
        _serve(link)
    except (EOFError, ConnectionError):
        os._exit(0)


def _exit_with(link: socket.socket) -> None:
    """End the process when the socket is closed, even while custom code runs."""
    poller = select.poll()
    # A hang-up is reported even with an empty event mask.
    poller.register(link, 0)
    poller.poll()
    os._exit(0)


def _serve(link: socket.socket) -> None:
    frames = link.makefile("rb")
    setup = pickle.loads(read_frame(frames, LENGTH))
    assert isinstance(setup, ReaderSource)
    try:
        reader = setup.line_reader()
    except Exception as error:
        _answer(link, REFUSED, str(error).encode()[:_MESSAGE_BYTES])
        return
    _answer(link, BATCH, b"")
    while True:
        lines = read_frame(frames, LENGTH)
        try:
            content = encode_batch(reader.parse(lines))
        except SampleError as error:
            _answer(link, REFUSED, str(error).encode("utf-8", "replace")[:_MESSAGE_BYTES])
        else:
            _answer(link, BATCH, content)


def _answer(link: socket.socket, status: int, content: bytes) -> None:
    link.sendall(ANSWER.pack(status, len(content)) + content)


if __name__ == "__main__":
    main()
