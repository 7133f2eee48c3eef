"""Faults of the services that a function calls: throttled, failed, hanging, cut off, or fatal to the caller.

They are set through `PUT /local/call-faults` and decided here, for AWS calls, and for Kubernetes requests, which come
by way of the edge's proxy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class FaultKind(StrEnum):
    """What happens to the call."""

    THROTTLE = "throttle"
    """Refused for now, without effect."""
    REFUSE = "refuse"
    """Refused for good, without effect: no permission."""
    FAIL_BEFORE = "fail_before"
    """An internal error, without effect."""
    FAIL_AFTER = "fail_after"
    """The effect takes place, and the answer is an internal error."""
    CUT = "cut"
    """The effect takes place, and the connection breaks in the middle of the answer."""
    HANG = "hang"
    """No effect, and no answer for as long as the caller waits."""
    KILL_BEFORE = "kill_before"
    """The calling function is killed before the call has an effect."""
    KILL_AFTER = "kill_after"
    """The calling function is killed once the call has had its effect."""

    @property
    def takes_effect(self) -> bool:
        """Whether the call is carried out."""
        return self in (FaultKind.FAIL_AFTER, FaultKind.CUT, FaultKind.KILL_AFTER)

    @property
    def kills(self) -> bool:
        """Whether the caller ends."""
        return self in (FaultKind.KILL_BEFORE, FaultKind.KILL_AFTER)


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """A call as faults know it. service: as signed, or ``kubernetes``; operation: the API's, or ``verb resource``."""

    access_key: str
    service: str
    operation: str


@dataclass(frozen=True, kw_only=True)
class CallFault:
    """One fault: from the `occurrence`-th matching call on (0: the first since the faults were set), `times` calls."""

    kind: FaultKind
    site: CallSite
    occurrence: int = 0
    times: int = 1

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Raises ValueError or TypeError for what is none."""
        return cls(**{**value, "kind": FaultKind(value["kind"]), "site": CallSite(**value["site"])})

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return asdict(self)


class CallFaults:
    """The faults that are set, and how often each has struck. One event loop."""

    def __init__(self) -> None:
        self._faults: tuple[CallFault, ...] = ()
        self._struck: list[int] = []
        self._seen: dict[CallSite, int] = {}

    def replace(self, faults: Iterable[CallFault]) -> None:
        """Set these instead of the earlier ones, and count anew."""
        self._faults = tuple(faults)
        self._struck = [0] * len(self._faults)
        self._seen = {}

    def strike(self, site: CallSite) -> FaultKind | None:
        """Count the call; the fault that hits it, if any."""
        number = self._seen.get(site, 0)
        self._seen[site] = number + 1
        for index, fault in enumerate(self._faults):
            if fault.site == site and fault.occurrence <= number < fault.occurrence + fault.times:
                self._struck[index] += 1
                return fault.kind
        return None

    def seen(self) -> list[dict[str, Any]]:
        """How often each call was made since the faults were set: `{site, count}`."""
        return [{"site": asdict(site), "count": count} for site, count in self._seen.items()]

    def struck(self) -> list[int]:
        """How often each fault has struck, in the order in which they were set."""
        return list(self._struck)


@dataclass(frozen=True, kw_only=True)
class ErrorAnswer:
    """An error in the words of the service that was called."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


_AWS_ERRORS = {
    FaultKind.THROTTLE: (400, "ThrottlingException"),
    FaultKind.REFUSE: (400, "AccessDeniedException"),
}
_S3_ERRORS = {FaultKind.THROTTLE: (503, "SlowDown"), FaultKind.REFUSE: (403, "AccessDenied")}
_KUBERNETES_ERRORS = {FaultKind.THROTTLE: (429, "TooManyRequests"), FaultKind.REFUSE: (403, "Forbidden")}
_MESSAGE = "a fault that was asked for"


def aws_error(kind: FaultKind, service: str, content_type: str) -> ErrorAnswer:
    """The error in the protocol of the request. content_type: the request's."""
    if service == "s3":
        status, code = _S3_ERRORS.get(kind, (500, "InternalError"))
        return _xml(status, f"<Error><Code>{code}</Code><Message>{_MESSAGE}</Message></Error>")
    status, code = _AWS_ERRORS.get(kind, (500, "InternalFailure"))
    if "x-www-form-urlencoded" in content_type:
        error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{_MESSAGE}</Message></Error>"
        return _xml(status, f"<ErrorResponse>{error}<RequestId>0</RequestId></ErrorResponse>")
    if "cbor" in content_type:
        body = b"\xa2" + b"".join(map(_cbor_text, ("__type", code, "message", _MESSAGE)))
        headers = (("content-type", "application/cbor"), ("smithy-protocol", "rpc-v2-cbor"))
        return ErrorAnswer(status=status, headers=headers, body=body)
    body = f'{{"__type": "{code}", "message": "{_MESSAGE}"}}'.encode()
    headers = (("content-type", content_type or "application/json"), ("x-amzn-errortype", code))
    return ErrorAnswer(status=status, headers=headers, body=body)


def kubernetes_error(kind: FaultKind) -> ErrorAnswer:
    """The error as a ``Status``."""
    code, reason = _KUBERNETES_ERRORS.get(kind, (500, "InternalError"))
    body = (
        f'{{"kind": "Status", "apiVersion": "v1", "metadata": {{}}, "status": "Failure", "message": "{_MESSAGE}", '
        f'"reason": "{reason}", "code": {code}}}'
    )
    return ErrorAnswer(status=code, headers=(("content-type", "application/json"),), body=body.encode())


def _xml(status: int, body: str) -> ErrorAnswer:
    return ErrorAnswer(status=status, headers=(("content-type", "text/xml"),), body=body.encode())


def _cbor_text(text: str) -> bytes:
    encoded = text.encode()
    head = bytes([0x60 + len(encoded)]) if len(encoded) < 24 else bytes([0x78, len(encoded)])
    return head + encoded
