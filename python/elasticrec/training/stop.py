"""Stopping a training from outside: after the batch at hand, with a checkpoint."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopped(Exception):  # noqa: N818 - not an error
    """The training was asked to stop and has come to a place where it can."""


@contextmanager
def stopping(request: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `request`; a second one ends the process at once.

    In a thread beside the main one there are no signals, and a callback is the way to stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: object) -> None:
        request()
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
