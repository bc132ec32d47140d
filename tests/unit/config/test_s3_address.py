"""Tables of addresses that users write for a bucket and its store."""

from __future__ import annotations

import pytest

from kvoffload.config.s3_address import S3Address, parse_s3_address, parse_s3_endpoint


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://cache", S3Address(bucket="cache")),
        ("s3://cache/", S3Address(bucket="cache")),
        ("s3://my.cache-2/kv/a_b/C", S3Address(bucket="my.cache-2", prefix="kv/a_b/C")),
    ],
)
def test_an_address_is_what_its_own_text_says(text: str, address: S3Address) -> None:
    assert parse_s3_address(text) == address
    assert parse_s3_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cache",
        "s3://",
        "s3:///kv",
        "http://cache",
        "s3://Cache",
        "s3://ab",
        "s3://key:secret@cache",
        "s3://cache/a b",
        "s3://cache/a//b",
        "s3://cache/../b",
        "s3://cache?region=x",
        "s3://cache/" + "a" * 513,
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_s3_address(text)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("https://store.example", "https://store.example"),
        ("https://store.example:9000/", "https://store.example:9000"),
        ("http://[::1]:9000", "http://[::1]:9000"),
    ],
)
def test_an_endpoint_is_a_host(text: str, endpoint: str) -> None:
    assert parse_s3_endpoint(text) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        "store.example",
        "ftp://store",
        "https://",
        "https://a:secret@store",
        "https://store/bucket",
        "https://s?x=1",
        "http://s:x",
    ],
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_s3_endpoint(text)
    assert "secret" not in str(refused.value)
