"""Time and memory of several methods on one batch, and the table that says them."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from batches import EXACT
from common import Call, captured, peak_bytes, timings

MIB = 2**20
REPLAYED = "replayed: "


@dataclass
class Measured:
    """Of one batch: seconds and bytes by method; those that ran out of memory have none."""

    seconds: dict[str, float]  # the median
    fastest: dict[str, float]  # of the same turns: far from the median where the machine was busy
    replayed: dict[str, float]  # the median as a CUDA graph, of the methods for which it was asked
    bytes: dict[str, int]

    @classmethod
    def of(
        cls, methods: dict[str, Call], device: torch.device, replay: Collection[str] = (), **options: Any
    ) -> Measured:
        peaks = {}
        for name, call in methods.items():
            try:
                if device.type == "cuda":
                    call()  # compiles kernels; libraries take their work space
                peaks[name] = peak_bytes(call, device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        calls = {name: methods[name] for name in peaks}
        for name in peaks:
            if name in replay:
                try:
                    calls[REPLAYED + name] = captured(methods[name])
                except RuntimeError as error:  # the report goes on without
                    print(f"{name}: not captured, {error}", file=sys.stderr)
        taken = timings(calls, device, **options)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        return cls(
            {name: medians[name] for name in peaks},
            {name: min(taken[name]) for name in peaks},
            {name: medians[REPLAYED + name] for name in peaks if REPLAYED + name in medians},
            peaks,
        )

    @property
    def best(self) -> dict[str, float]:
        """Seconds of the device's own time, as near as they are known."""
        return self.seconds | self.replayed

    def time_ratio(self, name: str, to: str) -> float:
        """Of replays where both methods have them, else of plain calls."""
        both = name in self.replayed and to in self.replayed
        return _ratio(self.replayed if both else self.seconds, name, to)

    def memory_ratio(self, name: str, to: str) -> float:
        return _ratio(self.bytes, name, to)

    def table(self, methods: list[str], reference: str) -> list[str]:
        against = f"× {reference}"
        replayed = f"{'replayed':>10}" if self.replayed else ""
        lines = [
            f"  {'forward + backward':<20}{'median ms':>11}{'fastest':>10}{replayed}{'× exact':>9}{against:>15}"
            f"{'peak MiB':>11}{'× exact':>9}"
        ]
        for name in methods:
            if name not in self.seconds:
                lines.append(f"  {name:<20}   out of memory")
                continue
            if self.replayed:
                replayed = f"{1e3 * self.replayed[name]:>10.3f}" if name in self.replayed else f"{'–':>10}"
            lines.append(
                f"  {name:<20}{1e3 * self.seconds[name]:>11.2f}{1e3 * self.fastest[name]:>10.2f}{replayed}"
                f"{self.time_ratio(name, EXACT):>9.2f}{self.time_ratio(name, reference):>15.2f}"
                f"{self.bytes[name] / MIB:>11.1f}{self.memory_ratio(name, EXACT):>9.2f}"
            )
        return lines


def _ratio(values: dict, name: str, to: str) -> float:
    return values[name] / values[to] if name in values and to in values else math.nan
