"""DynamoDB tables, S3 buckets and KMS keys."""

from __future__ import annotations

from typing import Any

from local_stack.resources.context import Created, Creator, DeploymentContext, Properties, pick


def create_table(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Create a table with its keys and indices; back-ups, encryption and protection have no meaning here."""
    name = properties.get("TableName", context.physical_name(logical_id, limit=255))
    client = context.client("dynamodb")
    client.create_table(
        TableName=name,
        BillingMode=properties.get("BillingMode", "PAY_PER_REQUEST"),
        **pick(
            properties,
            "AttributeDefinitions",
            "KeySchema",
            "GlobalSecondaryIndexes",
            "LocalSecondaryIndexes",
            "ProvisionedThroughput",
        ),
    )
    time_to_live = properties.get("TimeToLiveSpecification")
    if time_to_live and time_to_live.get("Enabled"):
        client.update_time_to_live(TableName=name, TimeToLiveSpecification=time_to_live)
    return Created(reference=name, attributes={"Arn": context.arn("dynamodb", f"table/{name}")})


def create_bucket(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Create a bucket, versioned where the template says so."""
    name = properties.get("BucketName", context.physical_name(f"{logical_id}-{context.region}", limit=63).lower())
    make_bucket(context.client("s3"), name, context.region)
    versioning = properties.get("VersioningConfiguration")
    if versioning:
        context.client("s3").put_bucket_versioning(Bucket=name, VersioningConfiguration=versioning)
    domain = f"{name}.s3.amazonaws.com"
    return Created(
        reference=name,
        attributes={"Arn": f"arn:aws:s3:::{name}", "DomainName": domain, "RegionalDomainName": domain},
    )


def make_bucket(client: Any, name: str, region: str) -> None:
    """Create a bucket in a region; us-east-1 is the one that must not be named."""
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    client.create_bucket(Bucket=name, **where)


def create_key(context: DeploymentContext, _logical_id: str, properties: Properties) -> Created:
    """Create a key; for HMAC keys spec and usage are kept."""
    created = context.client("kms").create_key(
        Description=properties.get("Description", ""),
        KeyUsage=properties.get("KeyUsage", "ENCRYPT_DECRYPT"),
        KeySpec=properties.get("KeySpec", "SYMMETRIC_DEFAULT"),
    )["KeyMetadata"]
    return Created(reference=created["KeyId"], attributes={"Arn": created["Arn"], "KeyId": created["KeyId"]})


def create_alias(context: DeploymentContext, _logical_id: str, properties: Properties) -> Created:
    """Give a key its alias."""
    name = properties["AliasName"]
    context.client("kms").create_alias(AliasName=name, TargetKeyId=properties["TargetKeyId"])
    return Created(reference=name)


def create_parameter(context: DeploymentContext, logical_id: str, properties: Properties) -> Created:
    """Create an SSM parameter."""
    name = properties.get("Name", context.physical_name(logical_id))
    context.client("ssm").put_parameter(Name=name, Value=properties["Value"], Type=properties.get("Type", "String"))
    return Created(reference=name, attributes={"Value": properties["Value"], "Type": properties.get("Type", "String")})


CREATORS: dict[str, Creator] = {
    "AWS::DynamoDB::Table": create_table,
    "AWS::S3::Bucket": create_bucket,
    "AWS::KMS::Key": create_key,
    "AWS::KMS::Alias": create_alias,
    "AWS::SSM::Parameter": create_parameter,
}
