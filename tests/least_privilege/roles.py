"""The roles of a deployment: what each may do by the template, and what each did by the record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from local_stack import LocalStack
from local_stack.access_keys import access_key_of_role
from local_stack.template import Environment, Resolver, StackTemplate
from tests.least_privilege.policies import Grant, Request, grants_of

# What the platform does with a function's or a state machine's role while it runs: no call of ours, so no record of it.
BY_THE_PLATFORM = frozenset(
    {
        "xray:PutTraceSegments", "xray:PutTelemetryRecords", "xray:GetSamplingRules", "xray:GetSamplingTargets",
        "logs:CreateLogStream", "logs:PutLogEvents",
        "logs:CreateLogDelivery", "logs:GetLogDelivery", "logs:UpdateLogDelivery", "logs:DeleteLogDelivery",
        "logs:ListLogDeliveries", "logs:PutResourcePolicy", "logs:DescribeResourcePolicies", "logs:DescribeLogGroups",
    }
)  # fmt: skip


class Roles:
    """The template's roles, resolved as they were deployed. template: the deployed one, or a changed copy of it."""

    def __init__(self, stack: LocalStack, template: StackTemplate) -> None:
        self._stack = stack
        self._calls = stack.calls()
        self._template = template
        deployment = stack.deployment

        def of(logical_id: str) -> str:
            return f"{template.name}/{logical_id}"

        machine_arn = stack.outputs["StateMachineArn"]
        account_id = machine_arn.split(":")[4]
        self.state_machine_arn = machine_arn
        self._resolver = Resolver(
            template,
            Environment(account_id=account_id, region=stack.region),
            reference=lambda logical_id: deployment.resources[of(logical_id)],
            attribute=lambda logical_id, name: deployment.attributes[of(logical_id)][name],
            imported=lambda name: name,
        )
        self._keys_of_resources = dict(self._encryption_keys())

    @property
    def names(self) -> list[str]:
        """Logical ids of the roles."""
        return sorted(self._of_type("AWS::IAM::Role"))

    def function_role(self, folder: str) -> str:
        """Logical id of the role of the function in this folder."""
        for properties in self._of_type("AWS::Lambda::Function").values():
            if properties["Handler"] == f"lambdas.{folder}.handler.handler":
                role: str = properties["Role"]["Fn::GetAtt"][0]
                return role
        raise KeyError(folder)

    def policies(self, role: str) -> list[dict[str, Any]]:
        """The documents of the role's policies as they stand in the template: changing them changes the copy."""
        attached = self._of_type("AWS::IAM::Policy").values()
        return [policy["PolicyDocument"] for policy in attached if {"Ref": role} in policy["Roles"]]

    def grants(self, role: str) -> list[Grant]:
        """What the role is granted, leaving out what only the platform uses."""
        found = [grant for document in self.policies(role) for grant in grants_of(self._resolver.resolve(document))]
        return [grant for grant in found if grant.action not in BY_THE_PLATFORM]

    def training_grants(self) -> list[Grant]:
        """What the managed policy for training pods grants."""
        (policy,) = self._of_type("AWS::IAM::ManagedPolicy").values()
        return list(grants_of(self._resolver.resolve(policy["PolicyDocument"])))

    def requests(self, role: str) -> list[Request]:
        """What the role asked for, each once."""
        reference = self._stack.deployment.resources[f"{self._template.name}/{role}"]
        return self.requests_by(access_key_of_role(reference))

    def requests_by(self, access_key: str) -> list[Request]:
        """What the holder of the access key asked for, with what that asks of encryption keys."""
        made: dict[str, Request] = {}
        for call in self._calls:
            if call["access_key"] == access_key:
                for asked in call["authorization"]:
                    for request in self._completed(Request(**asked)):
                        made[str(request)] = request
        return list(made.values())

    def _completed(self, request: Request) -> Iterable[Request]:
        if request.action in ("states:SendTaskSuccess", "states:SendTaskFailure"):
            # A token is that of a task of the recovery: the other state machine has none.
            request = Request(action=request.action, resource=self.state_machine_arn)
        yield request
        bucket_or_topic = request.resource.split("/", 1)[0]
        key = self._keys_of_resources.get(bucket_or_topic)
        for action in _KEY_ACTIONS.get(request.action, ()) if key else ():
            yield Request(action=action, resource=str(key))

    def _encryption_keys(self) -> Iterator[tuple[str, str]]:
        for logical_id, properties in self._of_type("AWS::SNS::Topic").items():
            if "KmsMasterKeyId" in properties:
                reference = self._stack.deployment.resources[f"{self._template.name}/{logical_id}"]
                yield reference, self._resolver.resolve(properties["KmsMasterKeyId"])
        for logical_id, properties in self._of_type("AWS::S3::Bucket").items():
            (rule,) = properties["BucketEncryption"]["ServerSideEncryptionConfiguration"]
            name = self._stack.deployment.resources[f"{self._template.name}/{logical_id}"]
            key = rule["ServerSideEncryptionByDefault"]["KMSMasterKeyID"]
            yield f"arn:aws:s3:::{name}", self._resolver.resolve(key)

    def _of_type(self, kind: str) -> Mapping[str, dict[str, Any]]:
        return {
            name: dict(item["Properties"]) for name, item in self._template.resources.items() if item["Type"] == kind
        }


# SNS developer guide, "Managing encryption keys": a publisher needs both. S3 user guide, "Protecting data with
# SSE-KMS": a whole upload needs a data key, a download its decryption.
_KEY_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "sns:Publish": ("kms:GenerateDataKey", "kms:Decrypt"),
    "s3:PutObject": ("kms:GenerateDataKey",),
    "s3:GetObject": ("kms:Decrypt",),
}
