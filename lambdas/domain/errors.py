"""Errors of the recovery.

TruestepError                     (truestep.contract)
├── TransientError                trying again may help: the state machine retries it by this very name
│   └── ConcurrentUpdateError     the incident changed since it was read
├── IncidentNotFoundError         no such incident in the table
├── DrivenElsewhereError          another execution drives the incident: this one must not act
├── JobLostError                  another incident has taken the job over: this one must not act on it
├── AlarmRefusedError             an alarm that intake must not act on; goes to the dead-letter queue
├── SettingsError                 a function's environment is incomplete or wrong
└── LinkError                     an approval link that is forged, changed or expired
"""

from __future__ import annotations

from truestep.contract import TruestepError


class TransientError(TruestepError):
    """Trying again may help. The state machine's ``Retry`` names this class, so subclasses are raised as this one."""


class ConcurrentUpdateError(TransientError):
    """The incident was changed by someone else since it was read: read it again and decide again."""


class IncidentNotFoundError(TruestepError):
    """No incident with this id is in the table."""


class DrivenElsewhereError(TruestepError):
    """Another execution drives the incident, so that this one does nothing. The state machine names this class."""


class JobLostError(TruestepError):
    """Another incident has taken the job over, so that nothing is done for this one but to close it."""


class AlarmRefusedError(TruestepError):
    """An alarm that intake must not act on; the message says which check failed."""


class SettingsError(TruestepError):
    """A function's environment is incomplete or wrong; the message names the variable."""


class LinkError(TruestepError):
    """An approval link that is forged, changed or expired."""
