"""What the text of a setting looks like: names, ARNs, addresses; what cannot be one is refused with an example."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_BUCKET = re.compile(r"(?!arn:)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def _shaped(pattern: str, example: str) -> AfterValidator:
    """Refuses a text that does not match as a whole, and shows one that does."""
    allowed = re.compile(pattern)

    def check(value: str) -> str:
        if not allowed.fullmatch(value):
            raise ValueError(f"{value!r} is not valid here; it looks like {example!r}")
        return value

    return AfterValidator(check)


Stage = Annotated[str, _shaped(r"[a-z][a-z0-9-]{0,15}", "prod")]
HyperPodArn = Annotated[
    str,
    _shaped(
        r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]+:[0-9]{12}:cluster/[a-z0-9]{12}",
        "arn:aws:sagemaker:us-west-2:111122223333:cluster/abc123def456",
    ),
]
HyperPodName = Annotated[str, _shaped(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", "training")]
EksName = Annotated[str, _shaped(r"[0-9A-Za-z][A-Za-z0-9_-]{0,99}", "training-eks")]


def _training_namespace(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", value):
        raise ValueError(
            f"{value!r} is no Kubernetes namespace: 1 to 63 lower-case letters, digits or dashes, as in 'research'; "
            "wildcards are not possible, list each namespace"
        )
    if re.fullmatch(r"kube-.*|aws-hyperpod", value):
        raise ValueError(
            f"{value!r} belongs to the cluster itself, and the recovery may write ConfigMaps in a training namespace: "
            "run training in a namespace of its own, as in 'research'"
        )
    return value


Namespace = Annotated[str, AfterValidator(_training_namespace)]
AmpArn = Annotated[
    str,
    _shaped(
        r"arn:aws[a-z-]*:aps:[a-z0-9-]+:[0-9]{12}:workspace/ws-[A-Za-z0-9-]+",
        "arn:aws:aps:us-west-2:111122223333:workspace/ws-1a2b3c",
    ),
]
QueryUrl = Annotated[str, _shaped(r"https?://\S+", "https://prometheus.example.com/workspaces/ws-1a2b3c")]
SecurityGroupId = Annotated[str, _shaped(r"sg-[0-9a-f]{8}([0-9a-f]{9})?", "sg-0a1b2c3d")]
SubnetId = Annotated[str, _shaped(r"subnet-[0-9a-f]{8}([0-9a-f]{9})?", "subnet-0a1b2c3d")]
VpcId = Annotated[str, _shaped(r"vpc-[0-9a-f]{8}([0-9a-f]{9})?", "vpc-0a1b2c3d")]
DomainName = Annotated[
    str, _shaped(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,63}", "approve.training.example.com")
]
CertificateArn = Annotated[
    str,
    _shaped(
        r"arn:aws[a-z-]*:acm:[a-z0-9-]+:[0-9]{12}:certificate/[a-z0-9-]+",
        "arn:aws:acm:us-west-2:111122223333:certificate/11112222-3333-4444-5555-666677778888",
    ),
]
BusName = Annotated[str, _shaped(r"[A-Za-z0-9._/-]{1,256}", "training-events")]
TopicArn = Annotated[
    str, _shaped(r"arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:\S+", "arn:aws:sns:us-west-2:111122223333:oncall")
]
KeyArn = Annotated[
    str,
    _shaped(
        r"arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+",
        "arn:aws:kms:us-west-2:111122223333:key/11112222-3333-4444-5555-666677778888",
    ),
]
Email = Annotated[str, _shaped(r"[^@\s]+@[^@\s]+", "oncall@example.com")]
AccountId = Annotated[str, _shaped(r"[0-9]{12}", "111122223333")]


def _checkpoint_location(value: str) -> str:
    bucket, _, prefix = value.partition("/")
    # What IAM reads as a wildcard or a variable would grant more than the location.
    if not _BUCKET.fullmatch(bucket) or set(prefix) & set("*?$"):
        raise ValueError(
            f"{value!r} is not a bucket name or bucket/prefix; "
            "leave out 's3://' and wildcards, as in 'my-checkpoints/llama'"
        )
    return value.rstrip("/")


CheckpointLocation = Annotated[str, AfterValidator(_checkpoint_location)]
"""``bucket`` or ``bucket/prefix``."""
