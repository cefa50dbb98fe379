"""Checks of numbers that more than one command makes: of the configuration, and of the machine or checkpoint found later.

Each returns the problem's text, or None. The caller raises its own error.
"""


def steps_problem(max_steps: int | None, *, resume_step: int) -> str | None:
    """Check that a run that resumes from `resume_step` has a step left to do."""
    if max_steps is None or max_steps > resume_step:
        return None
    return f"max_steps ({max_steps}) must be above the step resumed from ({resume_step}): nothing is left to do; raise it"


def tensor_parallel_problem(tp: int, *, num_gpus: int, key: str, gpu_ids: str) -> str | None:
    """Check that whole replicas of a server fit its GPUs.

    Args:
        key: the key that `tp` is the value of.
        gpu_ids: the key that lists the GPUs.
    """
    if num_gpus % tp == 0:
        return None
    return (
        f"{gpu_ids} names {num_gpus} GPU(s), which must be divisible by {key} ({tp}):"
        f" {num_gpus} % {tp} = {num_gpus % tp}; change either"
    )


def replicas_problem(num_replicas: int, *, num_ranks: int, key: str, ranks: str) -> str | None:
    """Check that every copy of the trainer's model gets the same number of ranks.

    Args:
        key: the key that `num_replicas` is the value of.
        ranks: what `num_ranks` counts, for the message.
    """
    if num_ranks % num_replicas == 0:
        return None
    divisors = ", ".join(str(number) for number in range(1, num_ranks + 1) if num_ranks % number == 0)
    return (
        f"{key} ({num_replicas}) must divide {ranks} ({num_ranks}): {num_ranks} % {num_replicas} = {num_ranks % num_replicas};"
        f" set it to one of {divisors}"
    )
