"""Servers that tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.tiers.s3_server import S3Server, serve_moto, serve_weed


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serve_weed(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with serve_moto() as server:
        yield server
