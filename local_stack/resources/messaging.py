"""SNS topics, SQS queues, event buses and rules."""

from __future__ import annotations

import json

from local_stack.resources.context import Created, Creator, DeploymentContext, Properties


def create_topic(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Create a topic, with its inline subscriptions and one that delivers to the local stack's inbox."""
    name = properties.get("TopicName", context.physical_name(logical_id, limit=256))
    client = context.client("sns")
    arn = client.create_topic(Name=name)["TopicArn"]
    client.subscribe(TopicArn=arn, Protocol="http", Endpoint=f"{context.endpoint_url}/local/sns")
    for subscription in properties.get("Subscription", ()):
        client.subscribe(TopicArn=arn, Protocol=subscription["Protocol"], Endpoint=subscription["Endpoint"])
    return Created(reference=arn, attributes={"TopicArn": arn, "TopicName": name})


def create_subscription(context: DeploymentContext, _logical_id: str, properties: Properties) -> Created:
    """Subscribe as the template says. Mail is accepted and goes nowhere; the inbox sees every message."""
    arn = context.client("sns").subscribe(
        TopicArn=properties["TopicArn"], Protocol=properties["Protocol"], Endpoint=properties["Endpoint"]
    )["SubscriptionArn"]
    return Created(reference=arn, attributes={"Arn": arn})


def create_queue(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Create a queue with its retention."""
    name = properties.get("QueueName", context.physical_name(logical_id, limit=80))
    attributes = {}
    if "MessageRetentionPeriod" in properties:
        attributes["MessageRetentionPeriod"] = str(properties["MessageRetentionPeriod"])
    url = context.client("sqs").create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    return Created(reference=url, attributes={"Arn": context.arn("sqs", name), "QueueName": name, "QueueUrl": url})


def create_event_bus(context: DeploymentContext, _logical_id: str, properties: Properties) -> Created:
    """Create an event bus; its resource policy has no meaning where nobody else can reach it."""
    name = properties["Name"]
    arn = context.client("events").create_event_bus(Name=name)["EventBusArn"]
    return Created(reference=name, attributes={"Arn": arn, "Name": name})


def create_rule(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Create a rule with its targets, dead-letter queues and retry policies."""
    name = properties.get("Name", context.physical_name(logical_id))
    bus = properties.get("EventBusName", "default").rsplit("/", 1)[-1]
    client = context.client("events")
    arn = client.put_rule(
        Name=name,
        EventBusName=bus,
        State=properties.get("State", "ENABLED"),
        **(
            {"EventPattern": json.dumps(properties["EventPattern"])}
            if "EventPattern" in properties
            else {"ScheduleExpression": properties["ScheduleExpression"]}
        ),
    )["RuleArn"]
    targets = properties.get("Targets")
    if targets:
        client.put_targets(Rule=name, EventBusName=bus, Targets=targets)
    return Created(reference=name, attributes={"Arn": arn})


CREATORS: dict[str, Creator] = {
    "AWS::SNS::Topic": create_topic,
    "AWS::SNS::Subscription": create_subscription,
    "AWS::SQS::Queue": create_queue,
    "AWS::Events::EventBus": create_event_bus,
    "AWS::Events::Rule": create_rule,
}
