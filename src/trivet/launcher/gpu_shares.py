"""Decides which GPUs each role of a run gets, and which share of their memory. Pure: the machine's GPUs are given.

`launcher.plan` calls it. `launcher.run` calls it before a run begins, to refuse a wrong division and to print the shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trivet.config.schema.inference import InferenceConfig
from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError
from trivet.key_names import key_name

INFERENCE, TEACHER, TRAINER = "inference", "teacher", "trainer"
SHARED_GPU_MEMORY = 0.5
"""Share of a GPU that the inference server takes when the trainer or a teacher needs the same one."""
SHARED_TEACHER_MEMORY = 0.25
"""Share of a GPU that a teacher's server takes when another role needs the same one."""
_CONTEXT_MEMORY = 0.08
"""Share of a GPU that is left for what no allocator counts: the CUDA contexts of a rank and of a server, and buffers of NCCL. vLLM
refuses to start where its share is not free besides its own context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShares:
    """The GPUs of each role, by their names in CUDA_VISIBLE_DEVICES; none means the CPU."""

    inference: tuple[str, ...]
    trainer: tuple[str, ...]
    teacher: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def servers_before(self, name: str) -> tuple[str, ...]:
        """Return the servers on a GPU of the role `name` that start before it.

        vLLM measures what it takes by what is free while it starts: memory that another process takes then counts as vLLM's, and
        memory that one frees ends it.
        """
        gpus = {TEACHER: self.teacher, INFERENCE: self.inference, TRAINER: self.trainer}
        earlier = list(gpus)[: list(gpus).index(name)] if name in gpus else []
        return tuple(server for server in earlier if not set(gpus[server]).isdisjoint(gpus[name]))

    @property
    def is_shared(self) -> bool:
        """True when the inference server is not alone on its GPUs."""
        return not set(self.inference).isdisjoint((*self.trainer, *self.teacher))

    @property
    def is_teacher_shared(self) -> bool:
        """True when the teacher's server is not alone on its GPUs."""
        return not set(self.teacher).isdisjoint((*self.trainer, *self.inference))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """The largest share of a GPU's memory that each role may take; 1 where a role is alone on its GPUs, or not there."""

    inference: float
    teacher: float
    trainer: float
    """The share of a rank while it learns. It includes the memory of a server that sleeps meanwhile."""


def share_gpus(config: RLConfig, gpus: Sequence[str]) -> GpuShares:
    """Choose which of the machine's GPUs each role gets.

    Raises:
        ConfigError: an id without a GPU, an id twice, or a role without any.
    """
    if not gpus:
        if config.trainer.device == "cuda":
            raise ConfigError('trainer.device is "cuda" but this machine shows no GPU; set it to "auto" or "cpu"')
        return GpuShares(inference=(), trainer=())
    serves, trains = config.inference is not None, config.trainer.device != "cpu"
    inference_ids = config.inference_gpu_ids if serves else []
    trainer_ids = config.trainer_gpu_ids if trains else []
    teaches = config.teacher_inference is not None
    teacher_ids = _teacher_ids(config, len(gpus)) if teaches else []
    notices: list[str] = []
    if len(gpus) == 1 and trainer_ids == [1]:
        trainer_ids = [0]
        if serves:
            notices.append(
                f"one GPU: inference and trainer share it (set {key_name('trainer_gpu_ids')} = [0] to say so yourself)"
            )
    for key, ids, is_used in (
        ("inference_gpu_ids", inference_ids, serves),
        ("trainer_gpu_ids", trainer_ids, trains),
        ("teacher_gpu_ids", teacher_ids, teaches),
    ):
        if is_used:
            _check_ids(key_name(key), ids, len(gpus))
    return GpuShares(
        inference=tuple(gpus[index] for index in inference_ids),
        trainer=tuple(gpus[index] for index in trainer_ids),
        teacher=tuple(gpus[index] for index in teacher_ids),
        notices=tuple(notices),
    )


def require_shared_gpu(config: RLConfig, shares: GpuShares) -> None:
    """Refuse `inference.sleep_while_training` where the trainer does not need the server's memory.

    Raises:
        ConfigError: no GPU is shared by the inference server and the trainer.
    """
    if not _sleeps(config) or not set(shares.inference).isdisjoint(shares.trainer):
        return
    raise ConfigError(
        f"{key_name('inference.sleep_while_training')} is for a server on the trainer's GPUs; "
        + ("here the two share none" if shares.inference else "this machine shows no GPU")
        + f": remove it, or give {key_name('inference_gpu_ids')} and {key_name('trainer_gpu_ids')} the same ids"
    )


def share_memory(config: RLConfig, shares: GpuShares) -> MemoryShares:
    """Divide the memory of GPUs that roles share."""
    inference = _cap_share(config.inference, _server_share(config, shares))
    teacher = _cap_share(config.teacher_inference, SHARED_TEACHER_MEMORY if shares.is_teacher_shared else 1.0)
    taken = [
        share
        for server, gpus, share in (
            (config.inference, shares.inference, 0.0 if _sleeps(config) else inference),
            (config.teacher_inference, shares.teacher, teacher),
        )
        if server is not None and not set(gpus).isdisjoint(shares.trainer)
    ]
    left = round(1 - sum(taken) - _CONTEXT_MEMORY, 3) if taken else 1.0
    return MemoryShares(inference=inference, teacher=teacher, trainer=min(config.trainer.gpu_memory_utilization, left))


def describe_memory(config: RLConfig, shares: GpuShares) -> list[str]:
    """Return a line for each group of GPUs that the same roles share, with the share of each role."""
    memory = share_memory(config, shares)
    gpus_by_users: dict[str, list[str]] = {}
    for gpu in dict.fromkeys((*shares.teacher, *shares.inference, *shares.trainer)):
        teacher = [f"teacher {memory.teacher:g}"] if gpu in shares.teacher else []
        server = [f"server {memory.inference:g}"] if gpu in shares.inference else []
        trainer = [f"trainer {memory.trainer:g}"] if gpu in shares.trainer else []
        if len(teacher + server + trainer) < 2:
            continue
        turns = [" in turn with ".join(server + trainer)] if server and trainer and _sleeps(config) else server + trainer
        users = " + ".join([*teacher, *turns, *([f"{_CONTEXT_MEMORY:g} for contexts"] if trainer else [])])
        gpus_by_users.setdefault(users, []).append(gpu)
    return [f"memory of GPU {', '.join(gpus)}: {users}" for users, gpus in gpus_by_users.items()]


def _sleeps(config: RLConfig) -> bool:
    return config.inference is not None and config.inference.sleep_while_training


def _cap_share(server: InferenceConfig | None, share: float) -> float:
    return min(server.gpu_memory_utilization, share) if server is not None else 1.0


def _server_share(config: RLConfig, shares: GpuShares) -> float:
    """Return the largest share of a GPU's memory that the inference server may take.

    A server that sleeps while the trainer learns shares the GPU only with what the trainer keeps there between two steps.
    """
    is_with_teacher = not set(shares.teacher).isdisjoint(shares.inference)
    if _sleeps(config) and config.trainer.model.fsdp_cpu_offload and not is_with_teacher:
        return round(1 - _CONTEXT_MEMORY, 3)  # the trainer keeps nothing on the GPU between two steps
    return SHARED_GPU_MEMORY if shares.is_shared else 1.0


def _teacher_ids(config: RLConfig, num_gpus: int) -> list[int]:
    if config.teacher_gpu_ids is not None:
        return config.teacher_gpu_ids
    if num_gpus > 1:
        raise ConfigError("teacher_gpu_ids is not set: name the GPUs of [teacher_inference]; they may be those of another role")
    return [0]


def _check_ids(key: str, ids: Sequence[int], num_gpus: int) -> None:
    missing = [index for index in ids if not 0 <= index < num_gpus]
    if missing or not ids or len(set(ids)) != len(ids):
        problem = f"GPU {', '.join(map(str, missing))} does not exist" if missing else "each GPU once, and at least one"
        raise ConfigError(
            f"{key} = {list(ids)}: {problem}; this machine shows {num_gpus} GPU(s), ids 0 to {num_gpus - 1} "
            "(CUDA_VISIBLE_DEVICES counts); change the ids"
        )
