"""How each CloudFormation resource type comes into being locally."""

from __future__ import annotations

from local_stack.resources import compute, messaging, storage, unmodelled
from local_stack.resources.context import Creator

CREATORS: dict[str, Creator] = {**storage.CREATORS, **messaging.CREATORS, **compute.CREATORS, **unmodelled.CREATORS}
"""Resource type -> function that creates it. A type that is missing here cannot be deployed."""
