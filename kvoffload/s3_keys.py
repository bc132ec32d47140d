"""Keys of an S3-compatible object store, from a file of the form that its other clients read."""

from __future__ import annotations

import configparser
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class S3Keys:
    """The keys of one user. `session_token`: of keys that expire; they are not read again."""

    key_id: str
    secret: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def parse_s3_keys(text: str) -> S3Keys:
    """The section `default`, or the only one. ValueError: what is missing, without what is there."""
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read_string(text)
    except configparser.Error:
        raise ValueError("it has lines that are no `name = value` below a [section]") from None
    names = file.sections()
    if "default" not in names and len(names) != 1:
        raise ValueError("it has no section [default]")
    section = file["default" if "default" in names else names[0]]
    for name in ("aws_access_key_id", "aws_secret_access_key"):
        if not section.get(name):
            raise ValueError(f"its section [{section.name}] has no {name}")
    return S3Keys(
        key_id=section["aws_access_key_id"],
        secret=section["aws_secret_access_key"],
        session_token=section.get("aws_session_token", ""),
    )
