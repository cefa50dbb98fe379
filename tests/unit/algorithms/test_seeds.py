from trivet.algorithms.seeds import derive_seed


def test_seeds_are_stable_across_versions_and_differ_by_path():
    assert derive_seed(42, "rollout", 7, 0) == 8267952237148987860
    paths = [(seed, "rollout", group, index) for seed in range(3) for group in range(20) for index in range(8)]
    seeds = {derive_seed(*path) for path in paths}
    assert len(seeds) == len(paths)
    assert all(0 <= seed < 2**63 for seed in seeds)
