"""Tables of addresses that users write for a Mooncake store."""

from __future__ import annotations

import pytest

from kvoffload.config.mooncake_address import MooncakeAddress, parse_mooncake_address


@pytest.mark.parametrize(
    ("text", "address", "endpoint"),
    [
        ("mooncake://far:50051", MooncakeAddress(host="far", port=50051), "far:50051"),
        ("mooncake://[::1]:7000/", MooncakeAddress(host="::1", port=7000), "[::1]:7000"),
    ],
)
def test_an_address_is_what_its_own_text_says(text: str, address: MooncakeAddress, endpoint: str) -> None:
    assert parse_mooncake_address(text) == address
    assert parse_mooncake_address(str(address)) == address
    assert address.endpoint == endpoint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "far:1",
        "mooncake://far",
        "mooncake://:1",
        "mooncake://far:port",
        "mooncake://far:70000",
        "http://far:1",
        "mooncake://me@far:1",
        "mooncake://far:1/store",
        "mooncake://far:1?a=b",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_mooncake_address(text)
