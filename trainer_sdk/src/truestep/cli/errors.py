"""Errors of the command line.

TruestepError
└── CommandError   what was asked for cannot be done; exit code 2
"""

from __future__ import annotations

from truestep.contract.errors import TruestepError


class CommandError(TruestepError):
    """The command cannot do what it was asked to. The message says what to change."""
