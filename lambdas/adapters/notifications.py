"""`lambdas.ports.Notifier` on SNS."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lambdas.adapters.aws import transient_errors
from lambdas.domain.message_formats import formats

_SUBJECT_LIMIT = 99


class SnsNotifier:
    """Publishes to the operators' topic. `client` is a boto3 SNS client."""

    def __init__(self, client: Any, topic_arn: str) -> None:
        self._client = client
        self._topic_arn = topic_arn

    def notify(self, subject: str, message: str, *, attributes: Mapping[str, str], url: str = "") -> None:
        """Publish to the operators' topic. `subject` is made printable ASCII and cut, as SNS demands; both come in
        part from events, so control characters are dropped. Empty attributes are left out: SNS refuses them.
        Subscribers may filter by the attribute ``kind``.
        """
        printable = re.sub(r"[^\x20-\x7e]+", " ", subject).strip()[:_SUBJECT_LIMIT] or "truestep"
        forms = formats(printable, message, url=url, thread=attributes.get("incident_id", ""))
        with transient_errors():
            self._client.publish(
                TopicArn=self._topic_arn,
                Subject=printable,
                MessageStructure="json",
                Message=json.dumps(forms, ensure_ascii=False),
                MessageAttributes={
                    name: {"DataType": "String", "StringValue": value} for name, value in attributes.items() if value
                },
            )
