"""The HTTP API behind the approval links."""

from __future__ import annotations

import json

import aws_cdk as cdk
from aws_cdk import aws_apigatewayv2 as apigateway
from aws_cdk import aws_apigatewayv2_integrations as integrations
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.acknowledgments import acknowledge
from infra.configuration import DeploymentSettings
from infra.functions import retention

# A link is a bearer token in the query string, so no field here may carry the query: $context.path does not.
_ACCESS_LOG = {
    "requestId": "$context.requestId",
    "requestTime": "$context.requestTime",
    "sourceIp": "$context.identity.sourceIp",
    "routeKey": "$context.routeKey",
    "path": "$context.path",
    "status": "$context.status",
    "responseLength": "$context.responseLength",
    "integrationError": "$context.integrationErrorMessage",
}


class ApprovalApi(Construct):
    """API, stage and logs. Routes come later: functions need the URL before the routes' own function exists."""

    def __init__(self, scope: Construct, construct_id: str, *, settings: DeploymentSettings) -> None:
        super().__init__(scope, construct_id)
        domain = settings.approval_domain
        self.api = apigateway.HttpApi(
            self,
            "Api",
            api_name=f"truestep-{settings.stage}",
            description="Pages and decisions of truestep's approval links",
            create_default_stage=False,
            # Otherwise the API's own address would be a way round whatever protects the name.
            disable_execute_api_endpoint=True if domain and domain.certificate_arn else None,
        )
        log_group = logs.LogGroup(
            self,
            "AccessLogs",
            log_group_name=f"/aws/vendedlogs/apigateway/truestep-{settings.stage}",
            retention=retention(settings.log_retention_days),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        stage = apigateway.CfnStage(
            self,
            "Stage",
            api_id=self.api.api_id,
            stage_name="$default",
            auto_deploy=True,
            access_log_settings=apigateway.CfnStage.AccessLogSettingsProperty(
                destination_arn=log_group.log_group_arn, format=json.dumps(_ACCESS_LOG, separators=(",", ":"))
            ),
            default_route_settings=apigateway.CfnStage.RouteSettingsProperty(
                throttling_rate_limit=10, throttling_burst_limit=20, detailed_metrics_enabled=True
            ),
        )

        self.url = f"https://{domain.name}" if domain else self.api.api_endpoint
        """Base URL of the links, without a trailing slash."""
        self.domain_target: str | None = None
        """What the DNS record of the name points to; None where the stack serves no name."""
        if domain and domain.certificate_arn:
            self.domain_target = self._serve(domain.name, domain.certificate_arn, stage)

    def _serve(self, name: str, certificate_arn: str, stage: apigateway.CfnStage) -> str:
        served = apigateway.CfnDomainName(
            self,
            "Domain",
            domain_name=name,
            domain_name_configurations=[
                apigateway.CfnDomainName.DomainNameConfigurationProperty(
                    certificate_arn=certificate_arn, endpoint_type="REGIONAL", security_policy="TLS_1_2"
                )
            ],
        )
        mapping = apigateway.CfnApiMapping(
            self, "Mapping", api_id=self.api.api_id, domain_name=served.ref, stage=stage.ref
        )
        mapping.add_dependency(stage)
        return served.attr_regional_domain_name

    def add_routes(self, decide_approval: lambda_.Function, show_console: lambda_.Function) -> None:
        """Serve the page and its charts (GET), take the decision (POST), and serve the console (GET)."""
        deciding = integrations.HttpLambdaIntegration("DecideApproval", decide_approval)
        showing = integrations.HttpLambdaIntegration("ShowConsole", show_console)
        for path, method, integration in (
            ("/incidents/{incident_id}", apigateway.HttpMethod.GET, deciding),
            ("/incidents/{incident_id}/charts/{name}", apigateway.HttpMethod.GET, deciding),
            ("/incidents/{incident_id}/decision", apigateway.HttpMethod.POST, deciding),
            ("/console", apigateway.HttpMethod.GET, showing),
        ):
            for route in self.api.add_routes(path=path, methods=[method], integration=integration):
                acknowledge(
                    route,
                    "The link authorises: the function verifies a KMS signature over what it is of, scope and expiry.",
                    "APIG4",
                )
