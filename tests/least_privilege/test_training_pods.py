"""The policy for training pods allows what the SDK asks of bucket and bus, and nothing that would undo a recovery."""

from __future__ import annotations

import pytest

from local_stack.access_keys import access_key_of_role
from tests.least_privilege import training_pod
from tests.least_privilege.policies import Request, allowed, refused, unused
from tests.least_privilege.roles import Roles

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
POD = access_key_of_role("TrainingPod")
OBJECT = f"arn:aws:s3:::{training_pod.BUCKET}/{training_pod.PREFIX}/step-00000019"


def test_a_pod_may_do_exactly_what_it_did(roles: Roles) -> None:
    requests = roles.requests_by(POD)
    assert refused(roles.training_grants(), requests) == []
    assert unused(roles.training_grants(), requests) == []


def test_a_pod_may_not_take_a_revocation_back(roles: Roles) -> None:
    grants = roles.training_grants()
    assert allowed(grants, Request(action="s3:DeleteObject", resource=f"{OBJECT}/trusted.json"))
    for action in ("s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion"):
        assert not allowed(grants, Request(action=action, resource=f"{OBJECT}/revoked.json"))


def test_a_pod_may_not_leave_its_prefix(roles: Roles) -> None:
    bucket = f"arn:aws:s3:::{training_pod.BUCKET}"
    grants = roles.training_grants()
    assert not allowed(grants, Request(action="s3:GetObject", resource=f"{bucket}/others/model.pt"))
    assert not allowed(grants, Request(action="s3:ListBucket", resource=bucket))
    assert not allowed(grants, Request(action="s3:ListBucket", resource=bucket, context={"s3:prefix": "others/"}))


def test_a_pod_speaks_in_its_own_name_only(roles: Roles) -> None:
    (sent,) = {request.resource for request in roles.requests_by(POD) if request.action == "events:PutEvents"}
    grants = roles.training_grants()
    own = "truestep.training.story0000001.research"
    others = (
        "truestep.training",
        "truestep.training.research",
        "truestep.training.story0000001.vision",
        "truestep.training.other0000001.research",
        "truestep.training.*",
        "truestep.recovery",
    )
    for source, may in ((own, True), *((other, False) for other in others)):
        request = Request(action="events:PutEvents", resource=sent, context={"events:source": source})
        assert allowed(grants, request) is may
    other = sent.rsplit("/", 1)[0] + "/default"
    context = {"events:source": own}
    assert not allowed(grants, Request(action="events:PutEvents", resource=other, context=context))
