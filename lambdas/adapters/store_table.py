"""Access to the recovery's table that the parts of the store share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from botocore.exceptions import ClientError

from lambdas.adapters.aws import error_code, transient_errors
from lambdas.domain.errors import TransientError

_MEETINGS: Final = 3
"""The other one of two transactions that meet is over after milliseconds: this one is tried again at once."""


class Table:
    """One DynamoDB table with string keys ``PK`` and ``SK``."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table

    def _item(self, pk: str, sk: str) -> dict[str, Any] | None:
        with transient_errors():
            answer = self._client.get_item(
                TableName=self._table, Key={"PK": {"S": pk}, "SK": {"S": sk}}, ConsistentRead=True
            )
        item: dict[str, Any] | None = answer.get("Item")
        return item

    def _transacted(self, writes: list[dict[str, Any]]) -> bool:
        """Do all of the writes or none. False: a condition of one of them does not hold.

        Raises `TransientError` where DynamoDB gave up for another reason: it cancels one of two transactions that meet
        on an item under the same code as one whose condition fails, and botocore tries neither again.
        """
        for _ in range(_MEETINGS):
            try:
                with transient_errors():
                    self._client.transact_write_items(TransactItems=writes)
            except ClientError as error:
                if error_code(error) != "TransactionCanceledException":
                    raise
                reasons = {str(one.get("Code")) for one in error.response.get("CancellationReasons") or ()} - {"None"}
                if reasons == {"ConditionalCheckFailed"}:
                    return False
            else:
                return True
        raise TransientError(f"DynamoDB cancelled the writes {_MEETINGS} times: {', '.join(sorted(reasons))}")

    def _items(
        self, pk: str, sk_prefix: str, *, newest_first: bool, page_size: int | None = None, attributes: str = ""
    ) -> Iterator[dict[str, Any]]:
        """attributes: names, with commas between; empty: all."""
        arguments: dict[str, Any] = {
            "TableName": self._table,
            "KeyConditionExpression": "PK = :pk AND begins_with(SK, :prefix)",
            "ExpressionAttributeValues": {":pk": {"S": pk}, ":prefix": {"S": sk_prefix}},
            "ConsistentRead": True,
            "ScanIndexForward": not newest_first,
            **({"Limit": page_size} if page_size else {}),
            **({"ProjectionExpression": attributes} if attributes else {}),
        }
        while True:
            with transient_errors():
                page = self._client.query(**arguments)
            yield from page["Items"]
            if "LastEvaluatedKey" not in page:
                return
            arguments["ExclusiveStartKey"] = page["LastEvaluatedKey"]
