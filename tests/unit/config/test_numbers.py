from trivet.config.check_roles import replicas_problem, steps_problem, tensor_parallel_problem


def test_a_resumed_run_needs_a_step_left_to_do() -> None:
    assert steps_problem(None, resume_step=5) is None
    assert steps_problem(6, resume_step=5) is None
    assert steps_problem(5, resume_step=5) == (
        "max_steps (5) must be above the step resumed from (5): nothing is left to do; raise it"
    )


def test_whole_replicas_fill_the_gpus_of_a_server() -> None:
    assert tensor_parallel_problem(2, num_gpus=4, key="inference.parallel.tp", gpu_ids="inference_gpu_ids") is None
    assert tensor_parallel_problem(2, num_gpus=3, key="teacher_inference.parallel.tp", gpu_ids="teacher_gpu_ids") == (
        "teacher_gpu_ids names 3 GPU(s), which must be divisible by teacher_inference.parallel.tp (2): 3 % 2 = 1; change either"
    )


def test_copies_of_the_model_share_the_ranks_evenly() -> None:
    assert replicas_problem(2, num_ranks=4, key="model.dp_replicate", ranks="the trainer's ranks") is None
    assert replicas_problem(4, num_ranks=6, key="model.dp_replicate", ranks="the trainer's ranks") == (
        "model.dp_replicate (4) must divide the trainer's ranks (6): 6 % 4 = 2; set it to one of 1, 2, 3, 6"
    )
