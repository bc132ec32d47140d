"""The table of vLLM versions shows the tests that ran, failed, or were never run."""

from __future__ import annotations

from docs.versions import read_report, render_versions

REPORT = """<testsuites><testsuite>
<testcase classname="tests.vllm.test_faults" name="a" time="1"/>
<testcase classname="tests.vllm.test_faults" name="b"><failure message="no"/></testcase>
<testcase classname="tests.vllm.test_faults" name="c"><error message="no"/></testcase>
<testcase classname="tests.vllm.test_http" name="d"><skipped message="no orjson"/></testcase>
<testcase classname="tests.unit.test_units" name="e"/>
</testsuite></testsuites>"""


def test_every_outcome_is_counted_with_its_file() -> None:
    found = {file: dict(outcomes) for file, outcomes in read_report(REPORT).items()}
    assert found == {"test_faults.py": {"passed": 1, "failed": 2}, "test_http.py": {"skipped": 1}}


def test_what_was_not_run_is_a_gap() -> None:
    page = render_versions({"0.33.0": read_report(REPORT), "0.9.0": {}}, ["test_faults.py", "test_new.py"])
    assert page.splitlines()[-4:] == [
        "| tests/vllm | 0.9.0 | 0.33.0 |",
        "|---|---|---|",
        "| `test_faults.py` | - | 1 passed, 2 failed |",
        "| `test_new.py` | - | - |",
    ]
