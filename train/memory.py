"""Peak memory of everything a run started on this machine."""

from __future__ import annotations

import threading

import psutil

SAMPLE_S = 2.0


class PeakMemory:
    """Samples the resident memory of this process and all its descendants. A context manager.

    Pages that processes share, such as Ray's object store, count once for each process that touched them, so the figure
    is an upper bound.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=SAMPLE_S * 5)

    @property
    def peak_gb(self) -> float:
        return self.peak_bytes / 1e9

    def _follow(self) -> None:
        me = psutil.Process()
        while True:
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)
            if self._stop.wait(SAMPLE_S):
                return
