"""Suites: many runs in one command, and the tables and figures that come of them."""

from typing import TYPE_CHECKING

from sfiformer.lazy import lazy_names

if TYPE_CHECKING:
    from sfiformer.suites.launch import run_suite
    from sfiformer.suites.report import report_suite
    from sfiformer.suites.suite import Suite, read_suite, suite_names

__all__ = ["Suite", "read_suite", "report_suite", "run_suite", "suite_names"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Suite": "sfiformer.suites.suite",
        "read_suite": "sfiformer.suites.suite",
        "report_suite": "sfiformer.suites.report",
        "run_suite": "sfiformer.suites.launch",
        "suite_names": "sfiformer.suites.suite",
    },
)
