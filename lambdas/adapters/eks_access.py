"""Access to the Kubernetes API of an EKS cluster: endpoint and CA from EKS, bearer token from the caller's credentials.

The token is what ``aws eks get-token`` prints: ``k8s-aws-v1.`` + unpadded base64url of a presigned STS
GetCallerIdentity whose signed header ``x-k8s-aws-id`` names the cluster. Nothing is sent to STS here: the API server
replays the URL.
"""

from __future__ import annotations

import base64
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import boto3
import httpx2
from botocore.config import Config
from botocore.model import ServiceId
from botocore.signers import RequestSigner
from lightkube import Client
from lightkube.config.kubeconfig import Context, SingleConfig
from lightkube.config.models import Cluster, User

from lambdas.adapters.aws import whole_answers
from truestep.contract import TruestepError

TOKEN_PREFIX = "k8s-aws-v1."  # noqa: S105 - a public prefix, not a secret
SIGNED_FOR_SECONDS = 60
"""``X-Amz-Expires`` of the presigned URL, as ``aws eks get-token`` sets it."""
REFRESH_AFTER_SECONDS = 45
"""A new token is signed well before the old URL expires; signing is local and takes a millisecond."""
REQUEST_TIMEOUT_SECONDS = 10.0


class ClusterAccessError(TruestepError):
    """The Kubernetes API of the cluster cannot be reached with this role. The message says what to grant or set."""


class EksTokens:
    """Signs bearer tokens for one EKS cluster and keeps the newest while it is fresh. Safe to share between threads."""

    def __init__(
        self, session: boto3.Session, eks_cluster_name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session = session
        self._cluster = eks_cluster_name
        self._clock = clock
        self._lock = threading.Lock()
        self._token = ""
        self._signed_at = float("-inf")

    def current(self, *, renew: bool = False) -> str:
        """A token that is valid for at least 15 more seconds; `renew` signs a new one in any case.

        Raises `ClusterAccessError` where the process has no AWS credentials or region.
        """
        with self._lock:
            if renew or self._clock() - self._signed_at >= REFRESH_AFTER_SECONDS:
                self._token = self._sign()
                self._signed_at = self._clock()
            return self._token

    def _sign(self) -> str:
        region = self._session.region_name
        credentials = self._session.get_credentials()
        if not region or credentials is None:
            raise ClusterAccessError(
                "no AWS region or credentials to sign an EKS token with: set AWS_REGION and a role"
            )
        # Whatever endpoint other calls are sent to, the token names the region's real STS: that is what is verified.
        real = Config(ignore_configured_endpoint_urls=True)
        endpoint = self._session.client("sts", region_name=region, config=real).meta.endpoint_url
        signer = RequestSigner(ServiceId("sts"), region, "sts", "v4", credentials, self._session.events)
        request = {
            "method": "GET",
            "url": f"{endpoint}/?Action=GetCallerIdentity&Version=2011-06-15",
            "body": {},
            "headers": {"x-k8s-aws-id": self._cluster},
            "context": {},
        }
        url = signer.generate_presigned_url(
            request, region_name=region, expires_in=SIGNED_FOR_SECONDS, operation_name=""
        )
        return TOKEN_PREFIX + base64.urlsafe_b64encode(url.encode()).decode().rstrip("=")


class BearerTransport(httpx2.BaseTransport):
    """Sends every request with the current token, and once more with a new one where the server answers 401."""

    def __init__(self, tokens: EksTokens, inner: httpx2.BaseTransport) -> None:
        self._tokens = tokens
        self._inner = inner

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["Authorization"] = f"Bearer {self._tokens.current()}"
        response = self._inner.handle_request(request)
        if response.status_code != httpx2.codes.UNAUTHORIZED:
            return response
        response.close()
        request.headers["Authorization"] = f"Bearer {self._tokens.current(renew=True)}"
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def connect(session: boto3.Session, eks_cluster_name: str) -> Client:
    """A lightkube client of the cluster, trusting only the cluster's own CA.

    Calls EKS DescribeCluster (``AWS_ENDPOINT_URL`` is honoured). Raises `ClusterAccessError` where the cluster does not
    exist or is not ready.
    """
    cluster = _describe(session, eks_cluster_name)
    authority = base64.b64decode(cluster["certificateAuthority"]["data"]).decode()
    trust = ssl.create_default_context(cadata=authority)
    transport = BearerTransport(EksTokens(session, eks_cluster_name), httpx2.HTTPTransport(verify=trust))
    config = SingleConfig(
        context_name=eks_cluster_name,
        context=Context(cluster=eks_cluster_name, user="recovery"),
        cluster=Cluster(server=cluster["endpoint"], certificate_auth_data=cluster["certificateAuthority"]["data"]),
        user=User(),
    )
    # Proxies of the environment would bypass the transport, and with it the token.
    return Client(config, timeout=httpx2.Timeout(REQUEST_TIMEOUT_SECONDS), transport=transport, trust_env=False)


def _describe(session: boto3.Session, eks_cluster_name: str) -> dict[str, Any]:
    eks = whole_answers(session.client("eks"))
    try:
        cluster: dict[str, Any] = eks.describe_cluster(name=eks_cluster_name)["cluster"]
    except eks.exceptions.ResourceNotFoundException as error:
        raise ClusterAccessError(
            f"EKS cluster {eks_cluster_name!r} does not exist in {session.region_name}: "
            "correct eks_cluster_name in the clusters setting"
        ) from error
    if not cluster.get("endpoint") or not cluster.get("certificateAuthority", {}).get("data"):
        raise ClusterAccessError(
            f"EKS cluster {eks_cluster_name!r} has status {cluster.get('status')} and no endpoint yet: try again later"
        )
    return cluster
