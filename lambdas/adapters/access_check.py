"""Looks at one cluster as the recovery will need it. Everything that fails becomes a finding that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import httpx2
from botocore.exceptions import BotoCoreError, ClientError

from lambdas.adapters.aws import client
from lambdas.adapters.cluster_ports import session
from lambdas.adapters.eks_access import connect
from lambdas.adapters.hyperpod import HyperPodCluster
from lambdas.adapters.kubernetes import Kubernetes
from lambdas.domain.cluster_access import CLUSTER_WIDE, IN_NAMESPACES, Finding, Lack, judge_access
from lambdas.domain.errors import TransientError
from lambdas.settings import ClusterSettings
from truestep.contract import TruestepError
from truestep.contract.words import counted


def findings_of(cluster: ClusterSettings) -> tuple[Finding, ...]:
    """Kubernetes, HyperPod and the checkpoints of one cluster, in this order."""
    return tuple(_findings(cluster))


def _findings(cluster: ClusterSettings) -> Iterator[Finding]:
    yield from _tried("Kubernetes permissions", partial(_kubernetes, cluster))
    yield from _tried("HyperPod", partial(_hyperpod, cluster))
    for location in cluster.checkpoint_buckets:
        yield from _tried(f"Checkpoints {location}", partial(_checkpoints, location))


def _tried(check: str, look: Callable[[], Iterable[Finding]]) -> tuple[Finding, ...]:
    try:
        return tuple(look())
    except (httpx2.TransportError, TransientError) as error:
        advice = "for a private endpoint set network and the cluster's security_group_id, then deploy"
        return (Finding(check=check, ok=False, detail=f"does not answer: {error}; {advice}"),)
    except (TruestepError, ClientError, BotoCoreError) as error:
        return (Finding(check=check, ok=False, detail=str(error)),)


def _kubernetes(cluster: ClusterSettings) -> Iterator[Finding]:
    """Asks for the groups, so that whoever asks needs none of what they may do."""
    kubernetes = Kubernetes(connect(session(), cluster.eks_cluster_name))
    try:
        for namespace in ("", *cluster.training_namespaces):
            needed = IN_NAMESPACES if namespace else CLUSTER_WIDE
            lacks = (
                Lack(group=group, verb=verb)
                for group, verbs in needed.items()
                for verb in verbs
                if not kubernetes.may(group, verb, namespace)
            )
            yield judge_access(namespace, lacks)
    finally:
        kubernetes.close()


def _hyperpod(cluster: ClusterSettings) -> Iterator[Finding]:
    instances = HyperPodCluster(client("sagemaker"), cluster.hyperpod_cluster_name).instances()
    yield Finding(check="HyperPod", ok=True, detail=counted(len(instances), "instance"))


def _checkpoints(location: str) -> Iterator[Finding]:
    bucket, _, prefix = location.partition("/")
    found = client("s3").list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/" if prefix else "", MaxKeys=1)
    word = "there are objects" if found.get("KeyCount") else "nothing there yet"
    yield Finding(check=f"Checkpoints {location}", ok=True, detail=word)
