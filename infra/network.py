"""Where the functions that call Kubernetes run when an EKS endpoint is private: an existing VPC, named by its ids."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from infra.configuration import DeploymentSettings, NetworkSettings

HTTPS = 443
_ANYWHERE = "0.0.0.0/0"


class Network(Construct):
    """Security group, its way into the clusters, and the interface endpoints that are asked for. Looks nothing up."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: DeploymentSettings,
        network: NetworkSettings,
        region: str,
    ) -> None:
        super().__init__(scope, construct_id)
        self._subnet_ids = list(network.subnet_ids)
        self._security_group_ids = list(network.security_group_ids) or [self._own_group(settings, network)]
        for service in network.interface_endpoints:
            ec2.CfnVPCEndpoint(
                self,
                "".join(word.capitalize() for word in service.replace(".", "-").split("-")),
                vpc_id=network.vpc_id or "",
                service_name=f"com.amazonaws.{region}.{service}",
                vpc_endpoint_type="Interface",
                private_dns_enabled=True,
                subnet_ids=self._subnet_ids,
                security_group_ids=[self._endpoint_group(network)],
            )

    def attach(self, function: lambda_.Function) -> None:
        """Let the function run here. The ids are given, so the L1 property is enough; an L2 VPC would look them up."""
        resource = function.node.default_child
        assert isinstance(resource, lambda_.CfnFunction)
        resource.vpc_config = lambda_.CfnFunction.VpcConfigProperty(
            subnet_ids=self._subnet_ids, security_group_ids=self._security_group_ids
        )

    def _own_group(self, settings: DeploymentSettings, network: NetworkSettings) -> str:
        group = ec2.CfnSecurityGroup(
            self,
            "Functions",
            vpc_id=network.vpc_id,
            group_description=f"truestep {settings.stage}: functions that call Kubernetes; HTTPS out, nothing in",
            security_group_egress=[_https(_ANYWHERE, "AWS and Kubernetes APIs")],
        )
        for index, cluster in enumerate(settings.clusters):
            if cluster.security_group_id:
                ec2.CfnSecurityGroupIngress(
                    self,
                    f"Cluster{index}",
                    group_id=cluster.security_group_id,
                    source_security_group_id=group.attr_group_id,
                    ip_protocol="tcp",
                    from_port=HTTPS,
                    to_port=HTTPS,
                    description=f"truestep {settings.stage}: the recovery's functions call the API server",
                )
        return group.attr_group_id

    def _endpoint_group(self, network: NetworkSettings) -> str:
        """One group for all endpoints, which lets the functions in and nobody else."""
        found = self.node.try_find_child("Endpoints")
        if isinstance(found, ec2.CfnSecurityGroup):
            return found.attr_group_id
        group = ec2.CfnSecurityGroup(
            self,
            "Endpoints",
            vpc_id=network.vpc_id,
            group_description="truestep: interface endpoints, HTTPS from the functions",
            security_group_ingress=[
                ec2.CfnSecurityGroup.IngressProperty(
                    ip_protocol="tcp",
                    from_port=HTTPS,
                    to_port=HTTPS,
                    source_security_group_id=group_id,
                    description="HTTPS from the functions",
                )
                for group_id in self._security_group_ids
            ],
        )
        return group.attr_group_id


def _https(cidr: str, description: str) -> ec2.CfnSecurityGroup.EgressProperty:
    return ec2.CfnSecurityGroup.EgressProperty(
        ip_protocol="tcp", from_port=HTTPS, to_port=HTTPS, cidr_ip=cidr, description=description
    )
