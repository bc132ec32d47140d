"""Tables of addresses that users write for a Valkey server."""

from __future__ import annotations

import pytest

from kvoffload.config.valkey_address import ValkeyAddress, parse_valkey_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("valkey://far", ValkeyAddress(host="far")),
        ("valkeys://me@far:7000/3", ValkeyAddress(host="far", port=7000, database=3, user="me", has_tls=True)),
        ("valkey://[::1]:7000", ValkeyAddress(host="::1", port=7000)),
        ("valkey://a%40b@far/", ValkeyAddress(host="far", user="a@b")),
    ],
)
def test_an_address_is_what_its_own_text_says(text: str, address: ValkeyAddress) -> None:
    assert parse_valkey_address(text) == address
    assert parse_valkey_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "far:6379",
        "redis://far",
        "valkey://",
        "valkey://far:port",
        "valkey://far:70000",
        "valkey://far/one",
        "valkey://far/-1",
        "valkey://far?db=1",
        "valkey://me:secret@far",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_valkey_address(text)
    assert "secret" not in str(refused.value)
