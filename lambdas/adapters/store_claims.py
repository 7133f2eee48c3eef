"""Claims of nodes, and the circuit breaker that is checked in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lambdas.adapters.store_table import Table
from lambdas.domain.breaker import ClaimAnswer
from lambdas.domain.errors import TransientError
from truestep.contract.words import counted

MAX_NODES_A_CLAIM = 64
"""An alarm names at most 64 suspects; with the breaker's write this stays below DynamoDB's 100 a transaction."""
_ATTEMPTS = 5


class NodeClaims(Table):
    """One incident a node; at most so many nodes of a cluster in quarantine."""

    def claim_nodes(self, incident_id: str, cluster_arn: str, node_keys: Sequence[str], *, limit: int) -> ClaimAnswer:
        """Claim all of the nodes or none, unless more than `limit` of the cluster's would then be quarantined.

        Claiming again what is one's own is granted. `node_keys` are logical ids or node names; at most 64.
        """
        keys = tuple(dict.fromkeys(node_keys))
        if not 1 <= len(keys) <= MAX_NODES_A_CLAIM:
            raise ValueError(f"claim 1 to {MAX_NODES_A_CLAIM} nodes at once, got {len(keys)}")
        for _ in range(_ATTEMPTS):
            holders = {key: self.node_holder(key) for key in keys}
            theirs = {key: holder for key, holder in holders.items() if holder not in (None, incident_id)}
            if theirs:
                sentence = ", ".join(f"{key} is held by incident {holder}" for key, holder in sorted(theirs.items()))
                advice = "decide or close that one (go on from CloseIncident there), then resume here at ResolveNode"
                return ClaimAnswer(granted=False, reason=f"{sentence}: {advice}")
            wanted = [key for key, holder in holders.items() if holder is None]
            if not wanted:
                return ClaimAnswer(granted=True, reason="the nodes are this incident's already")
            room = limit - len(wanted)
            if room >= 0 and self._try_claim(incident_id, cluster_arn, wanted, room):
                return ClaimAnswer(granted=True, reason=f"claimed {', '.join(wanted)}")
            # Without those that it was to claim: where they are taken, it may have been by this incident, whose claim
            # was written though its answer got lost, or whose function runs twice. The next look tells.
            taken = self.quarantined(cluster_arn).difference(wanted)
            if len(taken) > room:
                return ClaimAnswer(
                    granted=False,
                    tripped=True,
                    reason=f"circuit breaker: {counted(len(taken), 'node')} of the cluster in quarantine, and "
                    f"{len(wanted)} more would pass the limit of {limit}; release or replace nodes, or raise the "
                    "policy's limit",
                )
            # Somebody claimed or released between the look and the write: look again.
        raise TransientError("the claims of these nodes keep changing; try again")

    def _try_claim(self, incident_id: str, cluster_arn: str, keys: Sequence[str], room: int) -> bool:
        writes: list[dict[str, Any]] = [
            {
                "Put": {
                    "TableName": self._table,
                    "Item": {
                        "PK": {"S": f"NODE#{key}"},
                        "SK": {"S": "CLAIM"},
                        "incident_id": {"S": incident_id},
                        "cluster_arn": {"S": cluster_arn},
                    },
                    "ConditionExpression": "attribute_not_exists(PK)",
                }
            }
            for key in keys
        ]
        writes.append(
            {
                "Update": {
                    "TableName": self._table,
                    "Key": {"PK": {"S": f"BREAKER#{cluster_arn}"}, "SK": {"S": "RECORD"}},
                    "UpdateExpression": "ADD #nodes :keys",
                    "ConditionExpression": "attribute_not_exists(#nodes) OR size(#nodes) <= :room",
                    "ExpressionAttributeNames": {"#nodes": "nodes"},
                    "ExpressionAttributeValues": {":keys": {"SS": list(keys)}, ":room": {"N": str(room)}},
                }
            }
        )
        return self._transacted(writes)

    def release_nodes(self, incident_id: str, cluster_arn: str, node_keys: Sequence[str]) -> None:
        """Give back those of the nodes that this incident holds, and their places in the breaker."""
        for key in dict.fromkeys(node_keys):
            if self.node_holder(key) != incident_id:
                continue
            # One transaction a node: claim and place go together, and a release killed half-way can be repeated.
            self._transacted(
                [
                    {
                        "Delete": {
                            "TableName": self._table,
                            "Key": {"PK": {"S": f"NODE#{key}"}, "SK": {"S": "CLAIM"}},
                            "ConditionExpression": "incident_id = :id",
                            "ExpressionAttributeValues": {":id": {"S": incident_id}},
                        }
                    },
                    {
                        "Update": {
                            "TableName": self._table,
                            "Key": {"PK": {"S": f"BREAKER#{cluster_arn}"}, "SK": {"S": "RECORD"}},
                            "UpdateExpression": "DELETE #nodes :keys",
                            "ExpressionAttributeNames": {"#nodes": "nodes"},
                            "ExpressionAttributeValues": {":keys": {"SS": [key]}},
                        }
                    },
                ]
            )

    def quarantined(self, cluster_arn: str) -> frozenset[str]:
        """Keys of the cluster's nodes in quarantine."""
        record = self._item(f"BREAKER#{cluster_arn}", "RECORD") or {}
        return frozenset(record.get("nodes", {}).get("SS", []))

    def node_holder(self, key: str) -> str | None:
        """Id of the incident that holds the node's claim."""
        claim = self._item(f"NODE#{key}", "CLAIM")
        return None if claim is None else str(claim["incident_id"]["S"])
