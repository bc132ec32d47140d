"""The engine is the one that reaches the memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvoffload.errors import UnsupportedError
from kvoffload.kvspec import build_page_map
from kvoffload.transfer import CopyDirection, HostEngine, calibration, compute_stream, cuda_engine, open_engine
from kvoffload.transfer.copy_ways import CopyWay, WayRule, WayTable
from tests.kit.kvspec.builders import dense

RULE = WayRule(direction=CopyDirection.SAVE, run_bytes=1, runs=1, way=CopyWay.BATCH)


def on(*devices: str) -> dict[str, SimpleNamespace]:
    """Returns tensors that are nothing but a device each."""
    return {str(index): SimpleNamespace(device=torch.device(device)) for index, device in enumerate(devices)}


def test_memory_of_the_host_gets_the_host_engine() -> None:
    page_map = build_page_map(dense(2))
    flat = torch.zeros(256, dtype=torch.uint8)
    for memory in ({"kv": flat}, {"kv": flat.data_ptr()}):
        with open_engine(page_map, memory) as engine:
            assert isinstance(engine, HostEngine)


@pytest.mark.parametrize("table", [None, (RULE,)])
def test_memory_of_a_cuda_device_gets_its_engine_and_the_ways_that_were_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, table: WayTable | None
) -> None:
    class Engine:
        def __init__(self, *given: object, **settings: object) -> None:
            self.given, self.settings, self.tables = given, settings, []  # type: ignore[var-annotated]
            self.kernel_problem = "this build has no kernels"

        def set_ways(self, table: WayTable) -> None:
            self.tables.append(table)

    monkeypatch.setattr(cuda_engine, "CudaEngine", Engine)
    monkeypatch.setattr(calibration, "find_ways", lambda page_map, device: table if device == 1 else ())
    page_map, memory = build_page_map(dense(2)), on("cuda:1", "cuda:1")
    engine = open_engine(page_map, memory, plan_limit=5)  # type: ignore[arg-type]
    assert isinstance(engine, Engine)
    assert (engine.given, engine.settings) == ((page_map, memory), {"plan_limit": 5})
    assert "this build has no kernels" in caplog.text
    assert engine.tables == ([] if table is None else [table])


@pytest.mark.parametrize("devices", [("meta",), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_memory_that_no_engine_reaches_is_refused(devices: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError, match=f"no copy engine reaches memory on {', '.join(sorted(devices))}"):
        open_engine(build_page_map(dense(2)), on(*devices))  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [{"plan_limit": 0}, {"host_threads": 5000}], ids=str)
def test_limits_are_handed_on(limits: dict[str, int]) -> None:
    with pytest.raises(UnsupportedError, match="at most 1024 threads"):
        open_engine(build_page_map(dense(2)), {"kv": torch.zeros(256, dtype=torch.uint8)}, **limits)


def test_only_a_cuda_device_has_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_stream(torch.device("cpu")) is None
    handles = {torch.device("cuda", 0): 0, torch.device("cuda", 1): 4711}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=handles[device]))
    assert [compute_stream(device) for device in handles] == [0, 4711]
