"""SIGTERM and SIGINT as a wish to stop at the next step, agreed on by all ranks."""

import signal
import threading
from types import FrameType
from typing import Any

import torch

from sfiformer import ranks


class Interruption:
    """Listens for the two signals within a `with` block; a second one acts as if nobody listened."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # others are not told of signals
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.__exit__()

    def agreed(self) -> int:
        """The signal that some rank received, 0 for none; all ranks must ask, and get the same answer."""
        if ranks.count() == 1:
            return self.received
        return int(ranks.largest(torch.tensor(self.received, device=self.device)))


class Interrupted(SystemExit):
    """Training stopped for a signal, with a checkpoint; the exit code is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name
