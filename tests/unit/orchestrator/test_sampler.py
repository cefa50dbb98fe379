from trivet.orchestrator.sampler import ExampleSampler
from trivet.wire.rollouts import GroupId

SIZES = {"a": 5, "b": 3}


def test_each_epoch_visits_every_example_once():
    sampler = ExampleSampler(SIZES, seed=1)
    for _ in range(3):
        epoch = {(draw.env, draw.example_id) for draw in (sampler.take() for _ in range(8))}
        assert epoch == {("a", i) for i in range(5)} | {("b", i) for i in range(3)}


def test_ids_are_handed_out_in_order_and_never_twice():
    sampler = ExampleSampler(SIZES, seed=1)
    assert [sampler.take().group_id for _ in range(20)] == list(range(20))


def test_an_id_alone_names_the_example():
    first = [ExampleSampler(SIZES, seed=7).draw(GroupId(index)) for index in range(24)]
    later = ExampleSampler(SIZES, seed=7, next_group_id=100)
    assert [later.draw(GroupId(index)) for index in reversed(range(24))] == first[::-1]


def test_another_seed_gives_another_order():
    order = [[ExampleSampler({"a": 50}, seed=seed).draw(GroupId(i)).example_id for i in range(50)] for seed in (1, 2)]
    assert order[0] != order[1]
    assert sorted(order[0]) == sorted(order[1])
