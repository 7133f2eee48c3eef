"""Who is calling: the static administrator token, and EKS tokens (`k8s-aws-v1.`), verified as AWS would verify them.

An EKS token is a presigned URL of STS GetCallerIdentity. The real service sends it to STS; here the signature is
computed again with the secret of the access key, so an expired, altered or foreign token is refused.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from local_stack.access_keys import SECRET_ACCESS_KEY
from local_stack.cluster.kubernetes.errors import unauthorized

TOKEN_PREFIX = "k8s-aws-v1."  # noqa: S105
ADMINISTRATORS = "system:masters"
_CLUSTER_HEADER = "x-k8s-aws-id"
_MAX_LIFETIME = timedelta(minutes=15)
_CLOCK_SKEW = timedelta(minutes=5)
_ALLOWED_PARAMETERS = frozenset(
    {
        "action", "version", "x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-expires",
        "x-amz-security-token", "x-amz-signature", "x-amz-signedheaders", "x-amz-user-agent",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Caller:
    """An authenticated caller."""

    user: str
    groups: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Principal:
    """An access key, its secret, and the Kubernetes groups that the role's access entry gives."""

    access_key: str
    secret_access_key: str
    role_arn: str
    groups: tuple[str, ...]


def parse_principals(document: Any) -> list[Principal]:
    """Principals from `{access_key: {role_arn, groups?, secret_access_key?}}`.

    Without a secret it is the one that all keys of the local stack share. Raises ValueError naming the mistake.
    """
    if not isinstance(document, dict):
        raise ValueError("principals must be {access_key: {role_arn, groups}}")  # noqa: TRY004 - a bad document
    principals = []
    for access_key, entry in document.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("role_arn"), str):
            raise ValueError(f"principal {access_key}: give its role_arn")  # noqa: TRY004 - a bad document
        groups = entry.get("groups", [])
        if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
            raise ValueError(f"principal {access_key}: groups must be a list of strings")
        principals.append(
            Principal(
                access_key=access_key,
                secret_access_key=entry.get("secret_access_key", SECRET_ACCESS_KEY),
                role_arn=entry["role_arn"],
                groups=tuple(groups),
            )
        )
    return principals


class Authenticator:
    """Turns a bearer token into a caller of this cluster, or raises 401. Thread-safe."""

    def __init__(self, eks_cluster_name: str, admin_token: str) -> None:
        self._cluster = eks_cluster_name
        self._admin_token = admin_token
        self._principals: dict[str, Principal] = {}
        self._lock = threading.Lock()

    def register(self, principals: Iterable[Principal]) -> None:
        """Add or replace access keys."""
        with self._lock:
            self._principals.update({principal.access_key: principal for principal in principals})

    def authenticate(self, authorization: str) -> Caller:
        """The caller of an `Authorization: Bearer ...` header."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise unauthorized()
        if hmac.compare_digest(token.encode(), self._admin_token.encode()):
            return Caller("local-administrator", frozenset({ADMINISTRATORS, "system:authenticated"}))
        if not token.startswith(TOKEN_PREFIX):
            raise unauthorized()
        encoded = token[len(TOKEN_PREFIX) :]
        try:
            url = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            principal = self._verify(url)
        except (binascii.Error, UnicodeDecodeError, ValueError, KeyError):
            raise unauthorized() from None
        return Caller(principal.role_arn, frozenset({*principal.groups, "system:authenticated"}))

    def _verify(self, url: str) -> Principal:
        parts = urlsplit(url)
        query = {key.lower(): values[0] for key, values in parse_qs(parts.query, strict_parsing=True).items()}
        host = parts.hostname or ""
        if parts.scheme != "https" or not host.startswith("sts.") or ".amazonaws.com" not in host or parts.path != "/":
            raise ValueError("not an STS URL")
        if set(query) - _ALLOWED_PARAMETERS or query["action"] != "GetCallerIdentity":
            raise ValueError("not GetCallerIdentity alone")
        if _CLUSTER_HEADER not in query["x-amz-signedheaders"].split(";"):
            raise ValueError("the cluster's name is not signed")
        _check_lifetime(query)
        access_key, _, region, service, _ = query["x-amz-credential"].split("/")
        with self._lock:
            principal = self._principals[access_key]
        expected = self._signature(urlunsplit(parts), query, principal, region, service)
        if not hmac.compare_digest(expected, query["x-amz-signature"]):
            raise ValueError("the signature is not that of this key, cluster and URL")
        return principal

    def _signature(self, url: str, query: Mapping[str, str], principal: Principal, region: str, service: str) -> str:
        parts = urlsplit(url)
        unsigned = "&".join(part for part in parts.query.split("&") if not part.startswith("X-Amz-Signature="))
        request = AWSRequest(
            method="GET",
            url=urlunsplit(parts._replace(query=unsigned)),
            headers={_CLUSTER_HEADER: self._cluster},
        )
        request.context["timestamp"] = query["x-amz-date"]
        signer = SigV4QueryAuth(Credentials(principal.access_key, principal.secret_access_key), service, region)
        canonical = signer.canonical_request(request)
        return str(signer.signature(signer.string_to_sign(request, canonical), request))


def _check_lifetime(query: Mapping[str, str]) -> None:
    signed_at = datetime.strptime(query["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    lifetime = timedelta(seconds=int(query["x-amz-expires"]))
    now = datetime.now(UTC)
    if not timedelta(0) < lifetime <= _MAX_LIFETIME:
        raise ValueError("lifetime out of range")
    # EKS accepts a token for 15 minutes from its signing, whatever X-Amz-Expires says.
    if not signed_at - _CLOCK_SKEW <= now <= signed_at + _MAX_LIFETIME:
        raise ValueError("expired, or signed in the future")
