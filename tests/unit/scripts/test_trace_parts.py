import pytest

from support.scripts import SCRIPTS, load_module

script = load_module(SCRIPTS / "bench" / "trace_parts.py")


def event(name: str, start: float, length: float, *, kind: str = "cpu_op", thread: int = 0) -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "pid": 1, "tid": thread}


def test_an_operator_is_counted_without_those_that_it_calls() -> None:
    events = [event("linear", 0, 10), event("mm", 2, 6), event("copy", 3, 1), event("mm", 12, 2), event("mm", 0, 5, thread=1)]
    found = script.summarize(events)
    assert {each["name"]: (each["ms"], each["calls"]) for each in found["operations"]} == {
        "mm": (0.012, 3),
        "linear": (0.004, 1),
        "copy": (0.001, 1),
    }
    assert found["of"] == "cpu"
    assert found["busy_percent"] == pytest.approx(100 * 12 / 14, abs=0.1), "between 10 and 12 nobody computes"


def test_where_there_is_a_gpu_its_kernels_count_alone() -> None:
    events = [event("launch", 0, 50), event("gemm", 10, 20, kind="kernel"), event("copy", 30, 10, kind="gpu_memcpy", thread=7)]
    found = script.summarize(events)
    assert found["of"] == "gpu"
    assert [(each["name"], each["percent"]) for each in found["operations"]] == [("gemm", 66.67), ("copy", 33.33)]
    assert found["busy_percent"] == 100.0


def test_a_trace_without_operations_is_no_error() -> None:
    assert script.summarize([{"ph": "M", "name": "process_name"}])["operations"] == []
