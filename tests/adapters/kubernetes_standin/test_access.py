"""Who gets in, and what they may do: EKS tokens signed by botocore, and the roles that are shipped."""

from __future__ import annotations

import base64
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.credentials import Credentials
from botocore.model import ServiceId
from botocore.signers import RequestSigner

from lambdas.domain.cluster_access import Group
from tests.adapters.kubernetes_standin.running_cluster import EKS_NAME, RunningCluster, running_cluster

RBAC = Path(__file__).resolve().parents[3] / "infra" / "kubernetes"
KEY, SECRET = "LOCALCordonNode", "not-a-real-secret"
ROLE = "arn:aws:iam::111122223333:role/CordonNode"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    cluster = {"training_namespaces": ["team-a"]}
    with running_cluster(tmp_path_factory.mktemp("guarded"), rbac_dir=str(RBAC), cluster=cluster) as running:
        # Everything but the right to ask what others may do.
        entry = {"role_arn": ROLE, "groups": sorted(set(Group) - {Group.REVIEW}), "secret_access_key": SECRET}
        outsider = {"role_arn": ROLE + "Outside", "groups": [], "secret_access_key": SECRET}
        code, _ = running.control("/local/principals", {KEY: entry, "LOCALOutside": outsider})
        assert code == 200
        yield running


def presigned(
    key: str = KEY,
    secret: str = SECRET,
    cluster: str = EKS_NAME,
    query: str = "Action=GetCallerIdentity&Version=2011-06-15",
    session_token: str | None = None,
) -> str:
    session = botocore.session.Session()
    signer = RequestSigner(
        ServiceId("sts"), "us-west-2", "sts", "v4", Credentials(key, secret, session_token),
        session.get_component("event_emitter"),
    )  # fmt: skip
    request: dict[str, Any] = {
        "method": "GET",
        "url": f"https://sts.us-west-2.amazonaws.com/?{query}",
        "body": {},
        "headers": {"x-k8s-aws-id": cluster},
        "context": {},
    }
    return str(signer.generate_presigned_url(request, region_name="us-west-2", expires_in=60, operation_name=""))


def token(url: str) -> str:
    return "k8s-aws-v1." + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


def status_of(cluster: RunningCluster, bearer: str, path: str = "/api/v1/pods", method: str = "GET") -> int:
    with cluster.http(bearer) as client:
        return client.request(method, path, json={} if method != "GET" else None).status_code


@pytest.mark.parametrize("session_token", [None, "a+session/token="])
def test_a_token_signed_with_the_roles_key_gets_in(guarded: RunningCluster, session_token: str | None) -> None:
    assert status_of(guarded, token(presigned(session_token=session_token))) == 200


@pytest.mark.parametrize(
    "url",
    [
        presigned(secret="another secret"),
        presigned(key="LOCALUnknown"),
        presigned(cluster="another-cluster"),
        presigned(query="Action=GetSessionToken&Version=2011-06-15"),
        presigned().replace("X-Amz-Expires=60", "X-Amz-Expires=600"),
        presigned().replace("sts.us-west-2.amazonaws.com", "sts.example.com"),
        presigned().replace("https://", "http://"),
        presigned() + "&Extra=1",
    ],
    ids=["secret", "key", "cluster", "action", "altered", "host", "plain", "parameter"],
)
def test_a_token_that_sts_would_refuse_is_401(guarded: RunningCluster, url: str) -> None:
    assert status_of(guarded, token(url)) == 401


@pytest.mark.parametrize("minutes", [-16, 10])
def test_a_token_of_another_time_is_401(guarded: RunningCluster, monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    signed_at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=minutes)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: signed_at.replace(tzinfo=None))
    url = presigned()
    assert signed_at.strftime("%Y%m%dT%H%M") in url, "the clock of the signer was not moved"
    monkeypatch.undo()
    assert status_of(guarded, token(url)) == 401


@pytest.mark.parametrize("bearer", ["", "k8s-aws-v1.", "k8s-aws-v1.!!!", "nonsense", "k8s-aws-v1.aGVsbG8"])
def test_no_token_or_a_broken_one_is_401_with_a_status_body(guarded: RunningCluster, bearer: str) -> None:
    with guarded.http(bearer) as client:
        answer = client.get("/api/v1/nodes")
    assert answer.status_code == 401
    assert (answer.json()["kind"], answer.json()["reason"]) == ("Status", "Unauthorized")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/namespaces/default/pods"),
        ("POST", "/api/v1/namespaces/team-a/configmaps"),
        ("GET", "/apis/batch/v1/namespaces/team-a/jobs/a"),
    ],
)
def test_a_member_of_all_groups_may_do_what_their_roles_name(guarded: RunningCluster, method: str, path: str) -> None:
    assert status_of(guarded, token(presigned()), path, method) not in (401, 403)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/v1/nodes/hyperpod-i-00000000000000000"),
        ("POST", "/api/v1/nodes"),
        ("POST", "/api/v1/namespaces/default/pods"),
        ("DELETE", "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs/a"),
        ("GET", "/api/v1/namespaces"),
        ("GET", "/api/v1/nodes"),
        ("GET", "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs"),
        ("GET", "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs/a"),
        ("GET", "/api/v1/namespaces/default/pods/a"),
        ("GET", "/api/v1/namespaces/default/pods/a/log"),
        ("POST", "/api/v1/namespaces/default/configmaps"),
        ("PATCH", "/api/v1/namespaces/kube-system/configmaps/aws-auth"),
        ("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews"),
    ],
)
def test_a_member_of_all_groups_may_do_no_more(guarded: RunningCluster, method: str, path: str) -> None:
    with guarded.http(token(presigned())) as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.json()["reason"]) == (403, "Forbidden")
    assert ROLE in answer.json()["message"]


def test_a_review_about_nobody_is_refused_as_a_real_server_does(guarded: RunningCluster) -> None:
    with guarded.http() as client:
        answer = client.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", json={"spec": {}})
    assert (answer.status_code, answer.json()["reason"]) == (422, "Invalid")


def test_a_role_without_groups_may_do_nothing(guarded: RunningCluster) -> None:
    assert status_of(guarded, token(presigned(key="LOCALOutside"))) == 403


def test_principals_without_a_role_are_refused(guarded: RunningCluster) -> None:
    code, body = guarded.control("/local/principals", {"LOCALx": {"groups": []}})
    assert (code, body["message"]) == (400, "principal LOCALx: give its role_arn")
