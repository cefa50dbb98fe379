from pathlib import Path

from trivet.process.openmp import count_physical_cores, cpu_server_environment, prepend_to_preload


def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings)
    assert count_physical_cores(cpus=range(4), root=tmp_path) == 2
    assert count_physical_cores(cpus=[0, 2], root=tmp_path) == 1


def test_a_server_that_has_its_environment_gets_the_same_again_and_need_not_restart() -> None:
    environment = cpu_server_environment({"LD_PRELOAD": "/lib/other.so"})
    assert environment["LD_PRELOAD"].endswith("/lib/other.so")
    assert cpu_server_environment(environment) == environment


def test_a_library_that_is_preloaded_already_is_not_named_twice() -> None:
    assert prepend_to_preload(["/a.so", "/b.so"], ld_preload="/b.so:/c.so") == "/a.so:/b.so:/c.so"
