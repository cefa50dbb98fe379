"""A run on a Ray cluster survives some of what happens to clusters; `scripts/chaos_nodes.py` does the rest, for longer."""

from pathlib import Path

import pytest

from support.cluster_run import ClusterRun
from support.node_chaos import NodeChaos
from support.nodes import can_make_nodes
from support.ray_nodes import make_ray_nodes

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")]
SCHEDULE = ["link cut for 5 s", "second driver", "machine that serves lost"]


def test_a_run_on_a_cluster_survives_and_its_history_is_proven(tmp_path: Path, tiny_model: Path) -> None:
    with make_ray_nodes(3, directory=tmp_path) as nodes:
        run = ClusterRun(tmp_path, tiny_model, nodes, max_steps=100_000)
        endured, report = NodeChaos(run=run, directory=tmp_path, seed=7).carry_out(SCHEDULE)
    assert [item.kind for item in endured] == SCHEDULE
    assert report.ledger.checks > 0
    assert sum(item.starts for item in endured) == 0  # nothing of it ended the run
