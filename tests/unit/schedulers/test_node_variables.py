"""Test what the variables of schedulers say about a job's start and about a pod's exit code."""

from collections.abc import Mapping

import pytest

from trivet.schedulers.node_variables import is_restarted_job, pod_exit_code


def pod(*, base: int = 0, job: int = 0, index: int = 0) -> dict[str, str]:
    return {"JOBSET_NODE_BASE": str(base), "JOBSET_JOB_INDEX": str(job), "JOB_COMPLETION_INDEX": str(index)}


@pytest.mark.parametrize(
    ("environ", "exit_code", "expected"),
    [
        pytest.param(pod(), 2, 2, id="the first pod refuses the configuration"),
        pytest.param(pod(index=1), 2, 75, id="a pod that trains has trouble of its own"),
        pytest.param(pod(base=2), 2, 75, id="a pod that serves has trouble of its own"),
        pytest.param(pod(base=2, job=1), 2, 75, id="the second pod that serves has it"),
        pytest.param(pod(index=1), 1, 1, id="any other failure stays one"),
        pytest.param(pod(index=1), 0, 0, id="the run is over"),
        pytest.param({"SLURM_PROCID": "1"}, 2, 2, id="a task of SLURM, whose code does not count"),
        pytest.param({}, 2, 2, id="a node that somebody started by hand"),
    ],
)
def test_only_the_first_pod_ends_with_a_code_that_is_final(environ: Mapping[str, str], exit_code: int, expected: int) -> None:
    assert pod_exit_code(exit_code, environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"SLURM_RESTART_COUNT": "0"}, False),
        ({"SLURM_RESTART_COUNT": "2"}, True),
        ({"JOBSET_RESTARTS": "0"}, False),
        ({"JOBSET_RESTARTS": "1"}, True),
    ],
)
def test_a_job_knows_whether_it_was_started_before(environ: Mapping[str, str], expected: bool) -> None:
    assert is_restarted_job(environ) is expected
