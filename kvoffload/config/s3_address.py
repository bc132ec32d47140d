"""Where a bucket of an S3-compatible object store is, as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

S3_FORM: Final = "s3://bucket[/prefix]"
ENDPOINT_FORM: Final = "https://host[:port], or http:// for a network on which no one can listen"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9._\-]+(?:/[A-Za-z0-9._\-]+)*")
_PREFIX_LIMIT = 512
"""S3's keys have at most 1,024 bytes, and what follows the prefix less than 256."""


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """The address of a bucket, which `parse_s3_address` reads and `str` writes out again. It has no secrets."""

    bucket: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


def parse_s3_address(text: str) -> S3Address:
    """Reads an address. ValueError: it is wrong; the error says why."""
    scheme, _, rest = text.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if scheme != "s3" or not bucket:
        raise ValueError("no scheme and bucket")
    if _BUCKET.fullmatch(bucket) is None:
        raise ValueError(f"{bucket!r} cannot be the name of a bucket: 3 to 63 of a-z, 0-9, . and -")
    if prefix and (_PREFIX.fullmatch(prefix) is None or {".", ".."} & set(prefix.split("/"))):
        raise ValueError(f"{prefix!r} has more than letters, digits, . _ - and / in it")
    if len(prefix) > _PREFIX_LIMIT:
        raise ValueError(f"a prefix of more than {_PREFIX_LIMIT} characters")
    return S3Address(bucket=bucket, prefix=prefix)


def parse_s3_endpoint(text: str) -> str:
    """Returns an endpoint without anything behind its host and port. ValueError: it is wrong; the error says why."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("no http:// or https:// and host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("keys have a file of their own, s3_credentials_file")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError("more than a port behind the host")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}"
