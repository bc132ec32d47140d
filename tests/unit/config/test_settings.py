"""Every setting's bounds, as tables; what is not a setting is none."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvoffload.config.settings import Settings


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().verify = "always"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("segment_size", "64MiB", "64GiB"),
        ("acquire_deadline", "1ms", "60s"),
        ("step_budget", "100us", "1s"),
        ("linger", "0s", "24h"),
        ("hand_over", "0s", "1h"),
        ("copy_threads", 0, 256),
        ("disk_queue", "10ms", "60s"),
        ("remote_queue", "10ms", "60s"),
        ("remote_timeout", "10ms", "60s"),
        ("remote_connections", 1, 64),
        ("promote_deadline", "0s", "60s"),
        ("arrival_deadline", "0s", "60s"),
        ("events_interval", "0s", "24h"),
        ("events_interval", "10s", "24h"),
        ("valkey_ttl", "0s", "8760h"),
    ],
)
def test_bounds_themselves_are_allowed(name: str, least: object, most: object) -> None:
    assert getattr(Settings(**{name: least}), name) < getattr(Settings(**{name: most}), name)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("acquire_deadline", "2h", "less than or equal to 60"),
        ("copy_threads", -3, "greater than or equal to 0"),
        ("copy_threads", 257, "less than or equal to 256"),
        ("linger", "25h", "less than or equal to 86400"),
        ("events_interval", "9s", "too short"),
        ("events_interval", "25h", "less than or equal to 86400"),
        ("remote_connections", 0, "greater than or equal to 1"),
        ("remote_timeout", "1ms", "greater than or equal to 0.01"),
        ("socket_mode", "0777", "'0600', '0660' or '0666'"),
        ("socket_mode", 0o660, "'0600', '0660' or '0666'"),
        ("socket_group", "g" * 33, "at most 32 characters"),
        ("s3_region", 5, "valid string"),
        ("mooncake_device", "s" * 257, "at most 256 characters"),
        ("save_policy", "sometimes", "'auto', 'eager', 'on_evict' or 'second_use'"),
        ("memroy", "1GiB", "not permitted"),
    ],
)
def test_beyond_them_is_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Settings(**{name: value})
