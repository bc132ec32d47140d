"""How many threads a server may have, by what limits them, and how many of them are for express channels."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvoffload.server.channels import express_channels
from kvoffload.server.channels.express_channels import count_channels
from kvoffload.server.common import thread_limit
from kvoffload.server.common.shares import has_shares
from kvoffload.server.common.thread_limit import RESERVE, count_allowed, count_spare

UNIFIED = "0::/pod/server\n"
DIVIDED = "8:pids:/pod/server\n4:memory:/pod\n0::/\n"
NO_LIMIT = resource.RLIM_INFINITY


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def limit_user(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    limits = {resource.RLIMIT_NPROC: (threads, NO_LIMIT), resource.RLIMIT_NOFILE: (NO_LIMIT, NO_LIMIT)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)


def limit_cgroup(root: Path, cgroup: str, limits: dict[str, str]) -> None:
    (root / "proc/self/cgroup").write_text(cgroup)
    for folder, text in limits.items():
        file = root / "sys/fs/cgroup" / folder / "pids.max"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.mark.parametrize(
    ("of_user", "cgroup", "limits", "allowed"),
    [
        (NO_LIMIT, "", {}, None),
        (1024, "", {}, 1024),
        (NO_LIMIT, UNIFIED, {"pod/server": "max\n"}, None),
        (NO_LIMIT, UNIFIED, {"pod/server": "1024\n"}, 1024),
        (4096, UNIFIED, {"pod/server": "1024\n", "pod": "2048\n"}, 1024),
        (4096, UNIFIED, {"pod/server": "max\n", "pod": "2048\n"}, 2048),
        (512, UNIFIED, {"pod/server": "1024\n"}, 512),
        (NO_LIMIT, UNIFIED, {"": "300\n"}, 300),
        (NO_LIMIT, DIVIDED, {"pids/pod/server": "1024\n"}, 1024),
        (NO_LIMIT, DIVIDED, {"pids/pod": "700\n"}, 700),
        (NO_LIMIT, UNIFIED, {"pod/server": "nonsense\n"}, None),
    ],
)
def test_the_least_limit_counts(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_user: int,
    cgroup: str,
    limits: dict[str, str],
    allowed: int | None,
) -> None:
    limit_user(monkeypatch, of_user)
    limit_cgroup(root, cgroup, limits)
    assert count_allowed(root) == (thread_limit.UNBOUNDED if allowed is None else allowed)


@pytest.mark.parametrize(
    ("threads", "spare"), [(8192, 8192 - RESERVE), (4096, 4096 - RESERVE), (1024, 512), (100, 50), (1, 1), (0, 1)]
)
def test_some_threads_are_kept_for_the_rest_of_the_server(
    root: Path, monkeypatch: pytest.MonkeyPatch, threads: int, spare: int
) -> None:
    limit_user(monkeypatch, threads)
    assert count_spare(root) == spare


@pytest.mark.parametrize(
    ("threads", "channels"), [(NO_LIMIT, 2048), (4096, 2048), (2048, 1536), (1024, 512), (256, 128), (2, 1)]
)
def test_channels_have_the_threads_that_are_left(
    root: Path, monkeypatch: pytest.MonkeyPatch, threads: int, channels: int
) -> None:
    limit_user(monkeypatch, threads)
    assert count_channels(root) == channels <= express_channels.MAX_CHANNELS


@pytest.mark.parametrize("threads", [8, 256, 1024, 4096])
def test_a_second_user_has_channels_at_common_limits(root: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    limit_user(monkeypatch, threads)
    limit = count_channels(root)
    of_first = 0
    while has_shares(of_first, of_first, total=of_first, limit=limit):
        of_first += 1
    assert of_first < limit
    assert has_shares(0, of_first, total=of_first, limit=limit)
