"""What can be wrong before anything is deployed.

InfrastructureError
    ConfigurationError    a setting of cdk.json (or of the --context file) is missing or malformed
    PreparationError      something that set-up makes, or another part provides, is not there
"""

from __future__ import annotations


class InfrastructureError(Exception):
    """Base of every error raised while the template is made; the message says what to do."""


class ConfigurationError(InfrastructureError):
    """A setting is missing or malformed; the message names each one."""


class PreparationError(InfrastructureError):
    """A file or a folder that synthesis reads is missing or inconsistent."""
