"""A node that the head will not take ends with an exit code that its scheduler understands; runs of nodes are integration tests."""

from collections.abc import Mapping

import pytest

from trivet.launcher.nodes.join import refusal_error
from trivet.launcher.nodes.messages import Refused

POD = {"JOBSET_NODE_BASE": "1"}


@pytest.mark.parametrize(
    ("is_old_start", "environ", "exit_code"),
    [
        pytest.param(True, POD, 75, id="a pod that reads an older decision: started again"),
        pytest.param(False, POD, 2, id="a pod that another start would not help"),
        pytest.param(True, {}, 2, id="another configuration on a node that somebody started by hand"),
        pytest.param(True, {"SLURM_PROCID": "1"}, 2, id="a task of SLURM, whose code does not count"),
    ],
)
def test_a_pod_with_another_configuration_is_started_again(
    is_old_start: bool, environ: Mapping[str, str], exit_code: int
) -> None:
    refused = Refused(reason="it reads another configuration", is_final=True, is_old_start=is_old_start)
    error = refusal_error(refused, index=1, environ=environ)
    assert error.exit_code == exit_code
    assert str(error) == "node 1 is refused by the first node: it reads another configuration"
