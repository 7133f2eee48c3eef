"""Local access keys: one per role, so that every recorded call can be attributed to the role that made it."""

from __future__ import annotations

import re

SECRET_ACCESS_KEY = "local-secret"  # noqa: S105 - grants nothing: it signs requests to servers of this machine
ADMINISTRATOR = "LOCALADMINISTRATOR"
EVENTBRIDGE = "LOCALEVENTBRIDGE"


def access_key_of_role(role_arn_or_name: str) -> str:
    """Return `LOCAL<role name>`, letters and digits only (what access key ids may hold)."""
    name = role_arn_or_name.rsplit("/", 1)[-1]
    return "LOCAL" + re.sub(r"[^A-Za-z0-9]", "", name)
