"""Resource types without local meaning: they get a name and an ARN, so that others can refer to them, and nothing else.

Listed one by one: a type that somebody adds to the template must be thought about, not skipped.
"""

from __future__ import annotations

from local_stack.resources.context import Created, Creator, DeploymentContext, Properties

_ARN_OF_TYPE = {
    "AWS::IAM::ManagedPolicy": ("iam", "policy/{name}", True),
    "AWS::IAM::Policy": ("iam", "policy/{name}", True),
    "AWS::Logs::LogGroup": ("logs", "log-group:{name}:*", False),
    "AWS::CloudWatch::Alarm": ("cloudwatch", "alarm:{name}", False),
    "AWS::CloudWatch::CompositeAlarm": ("cloudwatch", "alarm:{name}", False),
    "AWS::CloudWatch::Dashboard": ("cloudwatch", "dashboard/{name}", False),
}
_NAME_PROPERTIES = ("LogGroupName", "AlarmName", "DashboardName", "ManagedPolicyName", "PolicyName")
# Permissions: nothing is enforced here; the recorded calls can be held against the template's policies instead.
# Stages: the edge serves routes without one. Metadata: describes the template. Network: all is on one machine.
# Queries: there is no Logs Insights.
_WITHOUT_ARN = (
    "AWS::ApiGatewayV2::Stage",
    "AWS::CDK::Metadata",
    "AWS::EC2::SecurityGroup",
    "AWS::EC2::SecurityGroupIngress",
    "AWS::EC2::VPCEndpoint",
    "AWS::Events::EventBusPolicy",
    "AWS::Lambda::Permission",
    "AWS::Lambda::Version",
    "AWS::Logs::QueryDefinition",
    "AWS::Logs::ResourcePolicy",
    "AWS::S3::BucketPolicy",
    "AWS::SNS::TopicPolicy",
    "AWS::SQS::QueuePolicy",
)


def _with_arn(resource_type: str) -> Creator:
    service, pattern, is_global = _ARN_OF_TYPE[resource_type]

    def create(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
        given = [properties[name] for name in _NAME_PROPERTIES if name in properties]
        name = given[0] if given else context.physical_name(logical_id)
        resource = pattern.format(name=name)
        arn = context.global_arn(service, resource) if is_global else context.arn(service, resource)
        # CloudFormation's Ref of a managed policy is its ARN.
        reference = arn if resource_type == "AWS::IAM::ManagedPolicy" else name
        return Created(reference=reference, attributes={"Arn": arn, "PolicyArn": arn})

    return create


def _without_arn(context: DeploymentContext, logical_id: str, _properties: Properties) -> Created:
    return Created(reference=context.physical_name(logical_id))


CREATORS: dict[str, Creator] = {
    **{resource_type: _with_arn(resource_type) for resource_type in _ARN_OF_TYPE},
    **dict.fromkeys(_WITHOUT_ARN, _without_arn),
}
