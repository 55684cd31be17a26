"""Log lines that go to a function: which lines a block takes, and the logger after it."""

import logging
import threading
from collections.abc import Iterator
from contextvars import copy_context

import pytest

from elasticrec.net.logs import end_logging, forward_logs, log_to_stderr

ROOT = logging.getLogger("elasticrec")
logger = logging.getLogger("elasticrec.test_logs")


def settings() -> tuple[int, bool, list[logging.Handler]]:
    return ROOT.level, ROOT.propagate, list(ROOT.handlers)


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    # A command that another test ran without `cli.main` left its handler.
    end_logging()
    before = settings()
    yield
    assert settings() == before


def test_a_block_takes_the_lines_of_its_extent() -> None:
    lines: list[str] = []
    logger.info("before")
    with forward_logs(lines.append):
        logger.info("%d rows", 7)
        logger.warning("a problem: 100 %")
        logger.debug("a detail")
    logger.info("after")
    assert lines == ["7 rows", "a problem: 100 %"]


def test_an_inner_block_takes_its_lines_from_the_outer_one() -> None:
    outer, inner = list[str](), list[str]()
    with forward_logs(outer.append):
        logger.info("1")
        with forward_logs(inner.append):
            logger.info("2")
        logger.info("3")
    assert (outer, inner) == (["1", "3"], ["2"])


def test_a_thread_with_the_context_of_a_block_belongs_to_it() -> None:
    first, second = list[str](), list[str]()

    def log(text: str) -> None:
        logger.info(text)

    with forward_logs(first.append):
        own = threading.Thread(target=copy_context().run, args=(log, "own"))
        with forward_logs(second.append):
            for thread in (own, threading.Thread(target=log, args=("stranger",))):
                thread.start()
                thread.join()
    assert (first, second) == (["own", "stranger"], ["stranger"])


def test_no_line_is_lost_when_the_outer_block_ends_first() -> None:
    outer, inner, later = list[str](), list[str](), list[str]()
    first, second = forward_logs(outer.append), forward_logs(inner.append)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    logger.info("inner is still open")
    second.__exit__(None, None, None)
    third = forward_logs(later.append)
    copy_context().run(third.__enter__)
    logger.info("of no open block")
    third.__exit__(None, None, None)
    assert (outer, inner, later) == ([], ["inner is still open"], ["of no open block"])


def test_blocks_may_end_in_any_order_and_in_another_context() -> None:
    first, second = list[str](), list[str]()
    one, other = forward_logs(first.append), forward_logs(second.append)
    one.__enter__()
    copy_context().run(other.__enter__)
    one.__exit__(None, None, None)
    logger.info("text")
    other.__exit__(None, None, None)
    assert (first, second) == ([], ["text"])


def test_handlers_of_the_application_do_not_repeat_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    with forward_logs(lambda _: None):
        logger.warning("inside")
    logger.warning("outside")
    assert caplog.messages == ["outside"]


def test_an_error_of_the_function_reaches_the_caller() -> None:
    def fail(_: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError), forward_logs(fail):
        logger.info("text")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.WARNING])
def test_a_command_logs_until_its_end(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, "elasticrec")
    for _ in range(2):
        log_to_stderr(stamped=False)
    logger.info("inside")
    end_logging()
    logger.info("outside")
    assert capsys.readouterr().err == "inside\n"
    assert ROOT.level == level
