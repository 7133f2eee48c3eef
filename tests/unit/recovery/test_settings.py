"""Settings: each function gets what it declares, and says by name what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lambdas.domain.errors import SettingsError
from lambdas.settings import FUNCTION_VARIABLES, settings_from_environment

LAMBDAS = Path(__file__).parents[3] / "lambdas"
CLUSTER = {"hyperpod_cluster_name": "h", "eks_cluster_name": "e", "training_namespaces": ["n"]}
COMPLETE = {
    "TRUESTEP_TABLE": "t",
    "TRUESTEP_CLUSTERS": json.dumps({"arn:c": CLUSTER}),
    "TRUESTEP_POLICY": json.dumps({"clusters": {"arn:c": {"dry_run": True}}}),
}


def test_every_function_declares_its_settings_and_every_declaration_is_a_function() -> None:
    folders = {path.parent.name for path in LAMBDAS.glob("*/handler.py")}
    assert folders == set(FUNCTION_VARIABLES)


def test_a_function_gets_its_clusters_and_their_policies() -> None:
    settings = settings_from_environment("read_history", COMPLETE)
    assert settings.cluster("arn:c").eks_cluster_name == "e"
    assert settings.policy("arn:c").dry_run
    assert not settings.policy("arn:other").dry_run


def test_what_is_missing_or_wrong_is_named() -> None:
    with pytest.raises(SettingsError, match="TRUESTEP_TABLE"):
        settings_from_environment("read_history", {**COMPLETE, "TRUESTEP_TABLE": ""})
    with pytest.raises(SettingsError, match="TRUESTEP_CLUSTERS is not JSON"):
        settings_from_environment("read_history", {**COMPLETE, "TRUESTEP_CLUSTERS": "{"})
    for name in CLUSTER:
        broken = json.dumps({"arn:c": {key: value for key, value in CLUSTER.items() if key != name}})
        with pytest.raises(SettingsError, match=name):
            settings_from_environment("read_history", {**COMPLETE, "TRUESTEP_CLUSTERS": broken})
    with pytest.raises(SettingsError, match="FUNCTION_VARIABLES"):
        settings_from_environment("no_such_function", COMPLETE)


def test_a_function_cannot_read_what_it_did_not_declare() -> None:
    settings = settings_from_environment("read_history", COMPLETE)
    with pytest.raises(SettingsError, match="TRUESTEP_TOPIC_ARN"):
        _ = settings.topic_arn
    with pytest.raises(SettingsError, match="arn:none"):
        settings.cluster("arn:none")
