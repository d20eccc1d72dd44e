"""Work that runs beside its caller in a thread of its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Beside(ABC):
    """``start``, then ``done`` or ``join``. Work that fails leaves its error in ``_error``, and ``join`` raises it."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._error: Exception | None = None

    @abstractmethod
    def _run(self) -> None:
        """All of the work; does not raise."""

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; ``join`` says which."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end. Returns whether it has ended. Raises the error with which it did."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return self.done
