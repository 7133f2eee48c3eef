"""Arbitrary input to the two doors of the recovery: no error but the named ones, no change by looking, no forged yes.

`make soak` sends 10,000 inputs to each (TRUESTEP_FUZZ_INPUTS).
"""

from __future__ import annotations

import copy
import json
import os
import string
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lambdas.adapters.clock import SystemClock
from lambdas.decide_approval.handler import handler as decide_approval
from lambdas.domain.errors import AlarmRefusedError, IncidentNotFoundError, SettingsError
from lambdas.domain.incident import Incident, iso, job_of
from lambdas.domain.records import TrainingAttempt
from lambdas.notice_end.handler import handler as notice_end
from lambdas.receive_alarm.handler import handler as receive_alarm
from lambdas.record_training_event.handler import handler as record_training_event
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, asked, request
from tests.unit.recovery.alarms import an_alarm
from truestep.contract import ContractError

INPUTS = int(os.environ.get("TRUESTEP_FUZZ_INPUTS", "150"))
FUZZ = settings(
    max_examples=INPUTS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
REFUSALS = (AlarmRefusedError, ContractError, IncidentNotFoundError, SettingsError)
"""Errors that say what is wrong with an event; it then lies in the dead-letter queue, and people are told."""
ALPHABET = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a document, the root left out."""
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for key, value in inner:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


def changed(document: dict[str, Any], path: tuple[Any, ...], value: Any, *, remove: bool) -> dict[str, Any]:
    """A copy with one place changed or removed."""
    copied = copy.deepcopy(document)
    place: Any = copied
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return copied


ALARM_EVENT = {
    "source": "truestep.training.abcdefghijkl.team-a",
    "detail-type": "Training Corruption Alarm",
    "detail": an_alarm(ranks=(1, 2)).to_json(),
}
RESUME_EVENT = {
    "source": "truestep.training.abcdefghijkl.team-a",
    "detail-type": "Training Resumed",
    "detail": {
        "schema_version": 1,
        "executionArn": "arn:aws:states:us-east-1:123456789012:execution:truestep-prod-recovery:inc-0123456789abcdef",
        "run": an_alarm().to_json()["run"],
        "incident_id": "inc-0123456789abcdef",
        "step": 3,
        "nodes": ["a"],
        "checkpoint": an_alarm().to_json()["checkpoint"],
        "at": "2026-03-01T02:29:58Z",
    },
}


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    """An event of training with up to three places changed or gone."""
    event: dict[str, Any] = draw(st.sampled_from([ALARM_EVENT, RESUME_EVENT]))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(event)))
        event = changed(event, path, draw(values), remove=draw(st.integers(0, 5)) == 0)
    return event


@pytest.fixture
def trained_since(cloud: Cloud) -> None:
    """Another attempt of the job has been seen, so that times are compared."""
    now = iso(SystemClock().now())
    sign = TrainingAttempt(attempt_id="attempt-9", heard_at=now, seen_at=now)
    cloud.store.record_attempt(job_of(an_alarm()), sign)


@FUZZ
@given(event=events() | st.dictionaries(st.text(max_size=12), values))
@example(event=changed(ALARM_EVENT, ("detail", "detected_at"), "yesterday", remove=False))
@example(event=changed(ALARM_EVENT, ("detail", "detected_at"), "", remove=False))
@example(event=changed(RESUME_EVENT, ("detail", "at"), "soon", remove=False))
@example(event=changed(ALARM_EVENT, ("detail", "suspects", 0, "gpu_uuid"), "x" * 3000, remove=False))
@example(event=changed(ALARM_EVENT, ("detail", "alarm_id"), "", remove=False))
@example(event=changed(ALARM_EVENT, ("detail", "alarm_id"), "x" * 3000, remove=False))
@example(event=changed(ALARM_EVENT, ("detail", "step"), 10**40, remove=False))
@example(event=changed(ALARM_EVENT, ("detail", "verdict", "reason"), "\ud800", remove=False))
def test_intake_takes_an_event_or_says_what_is_wrong_with_it(cloud: Cloud, trained_since: None, event: Any) -> None:
    for function in (receive_alarm, record_training_event, notice_end):
        with suppress(*REFUSALS):
            assert function(json.loads(json.dumps(event)), CONTEXT)


@pytest.fixture
def link(cloud: Cloud, incident: Incident) -> dict[str, str]:
    """Query of a genuine link of the incident."""
    return asked(cloud, incident, "a token that nobody waits with")[1]


def respelt(signature: str, step: int) -> str:
    """The signature with another last character; steps 1 to 3 decode to the same bytes."""
    return signature[:-1] + ALPHABET[ALPHABET.index(signature[-1]) ^ step]


@FUZZ
@given(
    method=st.sampled_from(["GET", "POST"]),
    ending=st.sampled_from(["", "/decision", "/other"]),
    incident_id=st.none() | st.text(max_size=30),
    field=st.sampled_from(["scope", "expires", "signature"]),
    value=st.none() | st.text(max_size=60) | st.text(alphabet=ALPHABET, min_size=43, max_size=43) | st.integers(1, 63),
    body=st.text(max_size=60) | st.sampled_from(["decision=approve", "decision=reject", "decision=resume"]),
    encoded=st.booleans(),
)
@example("POST", "/decision", None, "signature", 1, "decision=approve", False)
@example("POST", "/decision", None, "scope", None, "decision=approve", False)
@example("GET", "/decision", None, "scope", None, "decision=approve", False)
def test_only_a_post_with_a_genuine_link_decides(
    cloud: Cloud,
    incident: Incident,
    link: dict[str, str],
    method: str,
    ending: str,
    incident_id: str | None,
    field: str,
    value: str | int | None,
    body: str,
    encoded: bool,
) -> None:
    before = cloud.store.load(incident.incident_id)
    query = dict(link)
    if isinstance(value, int):
        query["signature"] = respelt(query["signature"], value)
    elif value is not None:
        query[field] = value
    name = incident.incident_id if incident_id is None else quote(incident_id, safe="")
    event = request(method, f"/incidents/{name}{ending}", query)
    event |= {"body": body, "isBase64Encoded": encoded, "rawQueryString": urlencode(query, errors="replace")}
    answer = decide_approval(event, CONTEXT)
    after = cloud.store.load(incident.incident_id)
    genuine = query == link and incident_id is None
    assert 200 <= answer["statusCode"] < 500
    if answer["statusCode"] == 200:
        assert genuine
    if after != before:
        assert (method, ending, genuine) == ("POST", "/decision", True)
        assert after.approval is not None
        cloud.store.save(before.evolve(version=after.version))
