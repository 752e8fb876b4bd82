"""Exceptions whose message is written for the person at the terminal."""


class UserError(Exception):
    """Something the user can put right; printed without a traceback."""


class DamagedFileError(UserError):
    """A file is not what was written to it."""
