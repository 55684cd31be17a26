"""A process that runs a custom reader: units come in and batches go out through pipes.

`elasticrec.data.reader_processes` starts it; it exits when its standard input is closed.
"""

import os
import pickle
import signal
import struct
import sys
import time
from typing import IO, Any

from elasticrec import _core
from elasticrec.data.reader import LineReader

_LENGTH = struct.Struct("<Q")


def write_message(stream: IO[bytes], message: Any) -> None:
    """Write a message with its length in front."""
    content = pickle.dumps(message, protocol=5)
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def read_message(stream: IO[bytes]) -> Any:
    """Return the next message; raise `EOFError` at the end."""
    return pickle.loads(read_frame(stream, _LENGTH))


def read_frame(stream: IO[bytes], length_format: struct.Struct) -> bytes:
    """Read a length and as many bytes; raise `EOFError` at the end."""
    header = stream.read(length_format.size)
    if len(header) < length_format.size:
        raise EOFError
    (length,) = length_format.unpack(header)
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return content


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    # The parent process handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Send output of the user's code to standard error, away from the messages.
    os.dup2(2, 1)
    try:
        _serve(requests, replies)
    except (EOFError, BrokenPipeError):
        pass
    os._exit(0)


def _serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    setup = read_message(requests)
    parser = _core.Parser(setup["features"], missing=setup["missing"])
    try:
        reader = LineReader(setup["reader"], setup["source"], parser, labels=setup["labels"])
    except Exception as error:
        write_message(replies, ("error", error))
        return
    while True:
        unit, options = read_message(requests)
        try:
            record_batches = iter(_core.RecordReader(parser, [unit], _core.BatchOptions(**options)))
            while True:
                start = time.perf_counter()
                if (records := next(record_batches, None)) is None:
                    break
                read = time.perf_counter()
                batch = reader.batch(records)
                seconds = (read - start, time.perf_counter() - read)
                write_message(replies, ("batch", (_core.batch_to_parts(batch), seconds)))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            write_message(replies, ("error", error))
            return
        write_message(replies, ("end", None))


if __name__ == "__main__":
    main()
