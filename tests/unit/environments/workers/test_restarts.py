from trivet.environments.workers.restarts import RestartBudget


def test_the_wait_doubles_up_to_a_limit():
    budget = RestartBudget(limit=-1)
    assert [budget.next_delay_s() for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_there_are_as_many_consecutive_restarts_as_the_limit_says():
    budget = RestartBudget(limit=2)
    assert [budget.next_delay_s() for _ in range(3)] == [0.5, 1.0, None]
    assert budget.num_restarts == 2
    assert RestartBudget(limit=0).next_delay_s() is None


def test_a_finished_group_in_between_starts_the_count_anew():
    budget = RestartBudget(limit=1)
    for _ in range(5):
        assert budget.next_delay_s() == 0.5
        budget.finished_a_group()
    assert budget.num_restarts == 5


def test_a_worker_without_a_limit_may_end_any_number_of_times():
    budget = RestartBudget(limit=-1, num_consecutive=5000)
    assert budget.next_delay_s() == 30.0
