"""Forms of values that users may write, type by type."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from kvoffload.config.types import (
    ClassPath,
    Count,
    Duration,
    FilePath,
    Folders,
    MooncakeUrl,
    PlaceText,
    Price,
    Size,
    SizeOrAuto,
    SocketPath,
    Switch,
    TcpEndpoint,
    ValkeyUrl,
    split_folders,
)


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        (Size, "8GiB", 8 << 30),
        (Size, 4096, 4096),
        (SizeOrAuto, "auto", "auto"),
        (SizeOrAuto, "1MiB", 1 << 20),
        (Duration, "20ms", 0.02),
        (Duration, "2h", 7200.0),
        (Switch, "true", True),
        (Switch, False, False),
        (Count, "4", 4),
        (Count, 4, 4),
        (Price, "0.25", 0.25),
        (Price, 3, 3.0),
        (SocketPath, "s" * 107, "s" * 107),
        (FilePath, "/keys/ca.pem", "/keys/ca.pem"),
        (FilePath, "", ""),
        (Folders, "/nvme0/kv, /nvme1/kv/", "/nvme0/kv, /nvme1/kv/"),
        (TcpEndpoint, "", ""),
        (ValkeyUrl, "valkey://far", "valkey://far:6379/0"),
        (MooncakeUrl, "mooncake://far:7/", "mooncake://far:7"),
        (ClassPath, "ours.tiers:Tier_2", "ours.tiers:Tier_2"),
        (PlaceText, "store://far, 8 GiB", "store://far, 8 GiB"),
    ],
)
def test_a_value_is_read(kind: Any, written: object, read: object) -> None:
    found = TypeAdapter(kind).validate_python(written)
    assert found == read
    assert type(found) is type(read)


@pytest.mark.parametrize(
    ("kind", "written", "said"),
    [
        (Size, "12 parsecs", "unit 'parsecs'"),
        (ClassPath, "ours..tiers:Tier", "not the path of a module"),
        (PlaceText, "one\ntwo", "more than one line"),
        (Size, "-1GiB", "not a size"),
        (Size, -1, "negative"),
        (Size, None, "not a size"),
        (SizeOrAuto, "automatic", "not a size"),
        (Duration, 5, "the unit is missing"),
        (Duration, "soon", "not a duration"),
        (Switch, "perhaps", "valid boolean"),
        (Switch, 1, "valid boolean"),
        (Price, "dear", "could not convert"),
        (Price, True, "not a number"),
        (Price, "nan", "greater than or equal to 0"),
        (Price, -1, "greater than or equal to 0"),
        (Count, "many", "valid integer"),
        (Count, True, "valid integer"),
        (Count, 1.5, "valid integer"),
        (SocketPath, "/" + "ü" * 60, "longer than the kernel takes"),
        (FilePath, "ca.pem", "no absolute path"),
        (FilePath, "/ca\n.pem", "no absolute path"),
        (Folders, "/nvme0/kv, kv", "'kv' is no absolute path"),
        (Folders, "/nvme0/kv,/nvme0/kv/", "a folder is named twice"),
        (TcpEndpoint, "far", "far"),
        (ValkeyUrl, "redis://far", "no scheme and host"),
        (MooncakeUrl, "mooncake://far", "no scheme, host and port"),
    ],
)
def test_nonsense_is_refused(kind: Any, written: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(kind).validate_python(written)


def test_folders_are_split_without_what_means_nothing() -> None:
    assert split_folders(" /a/b/ ,, /c") == ["/a/b", "/c"]
    assert split_folders("") == []
