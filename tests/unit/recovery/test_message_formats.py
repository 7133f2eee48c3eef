"""A notification fits a phone and a chat channel, and its link survives in every form."""

from __future__ import annotations

import json

import pytest

from lambdas.domain.incident import open_incident
from lambdas.domain.message_formats import CHAT_LIMIT_CHARACTERS, PHONE_LIMIT_BYTES, TEXT_LIMIT_BYTES, formats
from lambdas.domain.messages import approval_wanted, closed
from lambdas.domain.records import CheckpointChoice, Verification
from tests.unit.recovery.alarms import NOW, an_alarm
from truestep.contract import CheckpointRef, Step

URL = (
    "https://abcdefghij.execute-api.us-west-2.amazonaws.com/incidents/inc-0123456789abcdef"
    "?scope=decide&expires=1795994185&signature=" + "s" * 43
)


@pytest.mark.parametrize("reason", ["short", "ä" * 5000, "<!channel> & <http://evil|click>\x00"])
def test_every_form_fits_and_has_the_whole_link(reason: str) -> None:
    message = approval_wanted(open_incident(an_alarm(job_name=reason), now=NOW, dry_run=False), URL)
    forms = formats(message.subject, message.text, url=URL, thread="inc-1")
    assert len(forms["sms"].encode()) <= PHONE_LIMIT_BYTES
    assert forms["sms"].endswith(f" {URL}")
    assert len(forms["default"].encode()) <= TEXT_LIMIT_BYTES
    assert URL in forms["default"]
    chat = json.loads(forms["https"])
    assert len(chat["content"]["description"]) <= CHAT_LIMIT_CHARACTERS
    assert chat["content"]["nextSteps"][0].endswith(URL)
    assert len(json.dumps(forms).encode()) < 256_000


def test_the_chat_form_is_a_custom_notification_and_mentions_nobody() -> None:
    chat = json.loads(formats("Approve? <!here>", "why <@U1>\nhttps://x", url="https://x", thread="inc-1")["https"])
    assert (chat["version"], chat["source"], chat["content"]["textType"]) == ("1.0", "custom", "client-markdown")
    assert chat["metadata"]["threadId"] == "inc-1"
    assert "<" not in chat["content"]["title"] + chat["content"]["description"]
    assert "https://x" not in chat["content"]["description"]


def test_a_message_without_a_link_asks_for_nothing() -> None:
    forms = formats("Incident closed: a/b", "it is over")
    assert "nextSteps" not in json.loads(forms["https"])["content"]
    assert forms["sms"] == "truestep: Incident closed: a/b"


def test_the_end_says_the_time_lost_and_that_nothing_is_left_to_do() -> None:
    choice = CheckpointChoice(
        checkpoint=CheckpointRef(uri="s3://c/step-00000099", step=Step(99), manifest_sha256="ab" * 32),
        reason="newest trusted",
        lost_steps=21,
    )
    ended = open_incident(an_alarm(), now=NOW, dry_run=False).evolve(
        checkpoint=choice, verification=Verification(resumed_at="2026-03-01T03:29:58Z")
    )
    text = closed(ended, "s3://evidence/report.json").text
    assert "Time lost: 60 minutes between alarm and resume (4.0 GPU-hours idle), and 21 steps computed again." in text
    assert "Nothing is left to do." in text
