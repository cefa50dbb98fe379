"""A Ray driver with an actor on each of several machines. It prints one look at the cluster after another, as lines of JSON."""

import json
import sys
import time
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_CALL_TIMEOUT_S = 1.0
_READY_TIMEOUT_S = 60.0


class Counter:
    """Counts the calls of its life."""

    def __init__(self) -> None:
        self._num_calls = 0

    def count(self) -> list[Any]:
        self._num_calls += 1
        return [ray.util.get_node_ip_address(), self._num_calls]


def _look_at(counter: Any) -> list[Any] | str:
    try:
        return ray.get(counter.count.remote(), timeout=_CALL_TIMEOUT_S)
    except ray.exceptions.RayError as exc:
        return type(exc).__name__


def main() -> None:
    num_actors = int(sys.argv[1])
    ray.init(log_to_driver=False, configure_logging=False)
    group = placement_group([{"CPU": 1}] * num_actors, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=_READY_TIMEOUT_S)
    where = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(num_actors)]
    actor_class: Any = ray.remote(num_cpus=1, max_restarts=0)(Counter)
    counters = [actor_class.options(scheduling_strategy=each).remote() for each in where]
    ray.get([counter.count.remote() for counter in counters], timeout=_READY_TIMEOUT_S)
    while True:
        counts = [_look_at(counter) for counter in counters]
        alive = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        print(json.dumps({"counts": counts, "alive": alive}), flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
