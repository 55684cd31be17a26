"""Stop a training after the current batch, with a checkpoint."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StopTraining(Exception):  # noqa: N818 - not an error
    """Raised between batches after a stop was requested."""


@contextmanager
def stop_on_signals(request: Callable[[], None]) -> Iterator[None]:
    """Call `request` on Ctrl-C and SIGTERM; a second signal ends the process at once.

    Outside the main thread no handlers are installed, because only the main thread receives signals.
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
