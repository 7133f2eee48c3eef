"""Reporting: the outbox, the event bus, and the hold after an alarm. Needs neither torch nor, until it sends, boto3."""

from truestep.report.event_bus import EventBus
from truestep.report.hold import EXIT_INTERRUPTED, EXIT_STOPPED, HoldSettings, report_sdc
from truestep.report.outbox import Outbox, OutboxEntry
from truestep.report.reporter import EventReporter, RetryPolicy, reporter_from_environment
from truestep.report.text import EXIT_HOLD_EXPIRED, EXIT_NOBODY_ACCUSED, alarm_text

__all__ = [
    "EXIT_HOLD_EXPIRED",
    "EXIT_INTERRUPTED",
    "EXIT_NOBODY_ACCUSED",
    "EXIT_STOPPED",
    "EventBus",
    "EventReporter",
    "HoldSettings",
    "Outbox",
    "OutboxEntry",
    "RetryPolicy",
    "alarm_text",
    "report_sdc",
    "reporter_from_environment",
]
