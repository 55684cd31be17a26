"""What the sockets of both clients have in common: how many there are, and what is said of one that fails."""

import os
import re
import ssl

from elasticrec.errors import ConfigError
from elasticrec.net.tls import tls_problem
from elasticrec.serving.protocol import BrokenError, Exchange

TIMEOUT_S = 30.0
RETRIES = 2
CONNECTIONS = 32

_NUMBER = re.compile(r"\[Errno (\d+)\]")


def check_connections(number: int) -> int:
    """How many connections may be open."""
    if not isinstance(number, int) or number < 1:
        raise ConfigError(f"connections: expected a whole number from 1 on, got {number!r}")
    return number


def broken(error: OSError | BrokenError, exchange: Exchange, host: str) -> BrokenError | TimeoutError:
    """What a call is told of a connection that failed."""
    # the system's own timeouts have a number and come before the deadline
    if isinstance(error, TimeoutError) and error.errno is None:
        return error
    was_kept = exchange.num_answered > 0 and not exchange.has_heard
    if isinstance(error, BrokenError):
        return BrokenError(str(error), was_kept=was_kept, is_final=error.is_final)
    if isinstance(error, ssl.SSLError) and (problem := tls_problem(error, host)):
        return BrokenError(problem, is_final=True)
    return BrokenError(_reason(error), was_kept=was_kept)


def _reason(error: OSError) -> str:
    """In the words of the system: asyncio has its own, and the numbers of all addresses that it tried."""
    number = error.errno if error.errno is not None else next(map(int, _NUMBER.findall(str(error))), None)
    text = os.strerror(number) if number is not None and number > 0 else error.strerror or str(error)
    text = text or type(error).__name__
    return f"{text[:1].lower()}{text[1:]}"
