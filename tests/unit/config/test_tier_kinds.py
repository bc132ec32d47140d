"""The table of tiers fits the settings, and is read by those that name tiers."""

from __future__ import annotations

from importlib import import_module

import pytest

from kvoffload.config.settings import Settings
from kvoffload.config.tier_kinds import TIER_KINDS, TierKind, list_tier_names
from kvoffload.metrics.server_metrics import SERVER_METRICS
from kvoffload.tiers.remote import RemotePlace


@pytest.mark.parametrize("kind", TIER_KINDS, ids=lambda kind: kind.name)
def test_each_kind_has_a_setting_that_is_empty_by_default(kind: TierKind) -> None:
    assert Settings.model_fields[kind.setting].default == ""


@pytest.mark.parametrize("kind", [kind for kind in TIER_KINDS if kind.place], ids=lambda kind: kind.name)
def test_the_class_of_each_place_is_there(kind: TierKind) -> None:
    assert kind.is_remote
    module, _, name = kind.place.partition(":")
    assert issubclass(getattr(import_module(module), name), RemotePlace)


def test_names_and_settings_are_unique() -> None:
    assert len({kind.name for kind in TIER_KINDS}) == len({kind.setting for kind in TIER_KINDS}) == len(TIER_KINDS)


def test_every_metric_of_tiers_lists_all_kinds() -> None:
    labels = {metric.labels["tier"] for metric in SERVER_METRICS if "tier" in metric.labels}
    assert labels == {list_tier_names(), f"memory, {list_tier_names()}"}
