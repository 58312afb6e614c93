"""What the outside tells a run: signals from the user, and verl's log."""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from pathlib import Path
from types import FrameType, TracebackType

_TRAINING = re.compile(rb"Training Progress")
_FATAL = re.compile(rb"ActorDiedError|WorkerCrashedError|A worker died or was killed|running low on memory")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class StopRequest:
    """Notes the first of SIGINT, SIGTERM and SIGHUP instead of raising, and ignores more of them, inside ``with``."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {name: signal.signal(name, self._note) for name in names}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)


class Log:
    """verl's log, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.training = False
        """verl has set everything up and begun to train."""
        self.fatal_at: float | None = None
        """When a worker was reported dead; verl may wait for it for ever."""
        self._offset = 0

    def look(self) -> None:
        """Read what is new."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
            self._offset = file.tell()
        self.training = self.training or _TRAINING.search(new) is not None
        if self.fatal_at is None and _FATAL.search(new):
            self.fatal_at = time.monotonic()

    def tail(self, num_lines: int) -> list[str]:
        """Last lines, without colours."""
        if not self.path.exists():
            return []
        with self.path.open(errors="replace") as file:
            lines = deque((line.rstrip() for line in file if line.strip()), maxlen=num_lines)
        return [_ANSI.sub("", line) for line in lines]
