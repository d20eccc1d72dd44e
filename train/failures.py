"""How a run ends early. In a file of its own, so that the entry point need not load Ray to name it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunFailed(RuntimeError):
    """A run that cannot go on; the message is the reason, in one line."""


class Unmendable(RunFailed):
    """A run that would end the same way if it went on from a checkpoint."""


class OutOfTime(Unmendable):
    """``run_timeout`` has passed."""


class ResumeError(RunFailed):
    """A checkpoint that this configuration cannot go on from; the message is one line."""


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGINT: end in an orderly way. Not an ``Exception``, so that nothing on the way swallows it.

    It arrives as a plain ``KeyboardInterrupt`` where Ray's core waits: of what a handler raises there, it knows nothing
    else, and fails with a ``SystemError``.
    """


@contextmanager
def stoppable() -> Iterator[None]:
    """Signals raise :class:`Stopped` in the main thread, for as long as the context lasts."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    catch_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@asynccontextmanager
async def stopped_by_signals() -> AsyncIterator[None]:
    """The same for a task of the main thread's loop: a signal cancels what is inside, and :class:`Stopped` is raised
    once that has ended. An exception in a handler would reach whatever the loop does at the moment."""
    loop, work = asyncio.get_running_loop(), asyncio.current_task()
    came: list[str] = []

    def end(number: signal.Signals) -> None:
        if not came:  # a second one would interrupt the clean-up that the first one asked for
            work.cancel()
        came.append(number.name)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        loop.add_signal_handler(number, end, number)
    try:
        yield
    except asyncio.CancelledError:
        if came:
            raise Stopped(came[0]) from None
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def catch_signals() -> None:
    """Have signals raise :class:`Stopped`. Call it again after ``ray.init``, which installs a handler of its own."""
    for number in SIGNALS:
        signal.signal(number, _stop)


def _stop(signum: int, frame: object) -> None:
    # One signal is enough: a second one would interrupt the clean-up that the first one asked for.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise Stopped(signal.Signals(signum).name)
