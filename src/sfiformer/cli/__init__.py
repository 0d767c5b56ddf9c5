"""The command line, `sfi`: one module for each command.

Commands import what they need when they run, so that `sfi --help` answers at once.
"""

from sfiformer.cli.app import main

__all__ = ["main"]
