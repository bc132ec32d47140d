"""Examples run: each script in examples/ names the test that runs it."""

from __future__ import annotations

from tests.house.tree import ROOT, read_texts, tracked_files

RUN_BY = {
    "examples/02_shared_server.py": "tests/examples/test_shared_server.py",
    "examples/03_two_engines_one_server.py": "tests/examples/test_shared_server.py",
    "examples/05_fleet/run.py": "tests/examples/test_fleet.py",
    "examples/06_working_engine.py": "tests/examples/test_shared_server.py",
    "examples/07_router/router.py": "tests/examples/test_router.py",
    "examples/08_prefill_and_decode/proxy.py": "tests/examples/test_prefill_and_decode.py",
    "examples/10_sglang_and_vllm/run.py": "tests/sglang/test_example.py",
    "examples/10_sglang_and_vllm/with_sglang.py": "tests/sglang/test_example.py",
    "examples/10_sglang_and_vllm/with_vllm.py": "tests/sglang/test_example.py",
    "examples/demo.py": "tests/vllm/test_newcomer.py",
    "examples/mini_engine/run.py": "tests/examples/test_mini_engine.py",
}


def test_every_example_is_run_by_a_test() -> None:
    scripts = {
        str(file)
        for file, text in read_texts().items()
        if file.parts[0] == "examples" and '__name__ == "__main__"' in text
    }
    assert scripts == set(RUN_BY)
    for script, test in RUN_BY.items():
        assert ROOT / test in [ROOT / file for file in tracked_files()]
        assert script.removeprefix("examples/") in (ROOT / test).read_text(), f"{test} does not run {script}"
