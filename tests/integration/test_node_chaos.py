"""A run over two nodes survives some of what happens to clusters; `scripts/chaos_nodes.py` does the rest, for longer."""

from pathlib import Path

import pytest

from support.node_chaos import NodeChaos
from support.node_run import NodeRun
from support.nodes import can_make_nodes, make_nodes

pytestmark = pytest.mark.skipif(not can_make_nodes(), reason="making network namespaces needs root and ip")
SCHEDULE = [("link cut for 5 s", 1), ("second first node", 1), ("node that serves lost", 1)]


def test_a_run_over_nodes_survives_and_its_history_is_proven(tmp_path: Path, tiny_model: Path) -> None:
    with make_nodes(2) as nodes:
        run = NodeRun(tmp_path, tiny_model, nodes, max_steps=100_000, num_train_nodes=1, num_servers=1)
        outcome = NodeChaos(run=run, directory=tmp_path, num_train_nodes=1).carry_out(SCHEDULE)
    assert [item.kind for item in outcome.endured] == [kind for kind, _ in SCHEDULE]
    assert outcome.report.ledger.checks > 0
    assert sum(item.starts for item in outcome.endured) == 0  # nothing of it ended the run
