"""Errors that are a user's to mend: one line that says what was wrong, where, and the remedy."""


class UserError(ValueError):
    """What the command line prints as one line, without a traceback, before it exits with code 2."""


class BadRowError(UserError):
    """A graph of a user's file that cannot be read. Such rows can be left out, if the user asks for it."""


class TrainingError(ValueError):
    """Training cannot go on; the message says why, what is kept, and how to resume."""
