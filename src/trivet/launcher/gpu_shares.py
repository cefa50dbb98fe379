"""Decides which GPUs each role of a run gets, and which share of their memory. The machine's GPUs are arguments; none is touched.

`launcher.plan` uses the result. `launcher.run` calls these functions before a run begins, to refuse an impossible division and to
print the shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trivet.config.schema.rl import RLConfig
from trivet.errors import ConfigError
from trivet.key_names import key_name

INFERENCE, TEACHER, TRAINER = "inference", "teacher", "trainer"
SHARED_GPU_MEMORY = 0.5
"""Share of a GPU's memory that the inference server takes when the trainer or a teacher uses the same GPU."""
SHARED_TEACHER_MEMORY = 0.25
"""Share of a GPU's memory that a teacher's server takes when another role uses the same GPU."""
_CONTEXT_MEMORY = 0.08
"""Share of a GPU's memory that is left for memory outside the allocators: the CUDA contexts of a rank and of a server, and buffers
of NCCL. vLLM refuses to start when its share is not free in addition to its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShares:
    """The GPUs of each role, by their names in CUDA_VISIBLE_DEVICES. A role without GPUs runs on the CPU, or does not exist."""

    inference: tuple[str, ...]
    trainer: tuple[str, ...]
    teacher: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    """Messages for the user about the choice."""

    def servers_before(self, name: str) -> tuple[str, ...]:
        """Return the servers that must answer before the role `name` starts, because they share a GPU with it.

        While vLLM starts, it measures its own memory by the free memory of the GPU. Memory that another process takes meanwhile
        would be counted as vLLM's, and vLLM fails when another process frees memory.
        """
        gpus = {TEACHER: self.teacher, INFERENCE: self.inference, TRAINER: self.trainer}
        earlier = list(gpus)[: list(gpus).index(name)] if name in gpus else []
        return tuple(server for server in earlier if not set(gpus[server]).isdisjoint(gpus[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """The largest share of a GPU's memory that each role may take, as the configuration and the other roles on the GPU allow."""

    inference: float
    teacher: float
    trainer: float
    """The share of a rank during a training step. It includes the memory of a server that sleeps meanwhile."""


def share_gpus(config: RLConfig, gpus: Sequence[str]) -> GpuShares:
    """Choose which of the machine's GPUs each role gets.

    Raises:
        ConfigError: an id names no GPU, a role has an id twice, or a role has no GPU.
    """
    num_gpus = len(gpus)
    if not num_gpus:
        if config.trainer.device == "cuda":
            raise ConfigError('trainer.device is "cuda" but this machine shows no GPU; set it to "auto" or "cpu"')
        return GpuShares(inference=(), trainer=())
    ids: dict[str, list[int]] = {}
    if config.inference is not None:
        ids["inference_gpu_ids"] = config.inference_gpu_ids
    if config.trainer.device != "cpu":
        ids["trainer_gpu_ids"] = config.trainer_gpu_ids
    if config.teacher_inference is not None:
        if config.teacher_gpu_ids is None and num_gpus > 1:
            raise ConfigError(
                "teacher_gpu_ids is not set: name the GPUs of [teacher_inference]; they may be those of another role"
            )
        ids["teacher_gpu_ids"] = [0] if config.teacher_gpu_ids is None else config.teacher_gpu_ids
    notices: list[str] = []
    if num_gpus == 1 and ids.get("trainer_gpu_ids") == [1]:
        ids["trainer_gpu_ids"] = [0]
        if config.inference is not None:
            notices.append(
                f"one GPU: inference and trainer share it (set {key_name('trainer_gpu_ids')} = [0] to say so yourself)"
            )
    for key, chosen in ids.items():
        _check_ids(key_name(key), chosen, num_gpus)
    names = {key: tuple(gpus[index] for index in chosen) for key, chosen in ids.items()}
    return GpuShares(
        inference=names.get("inference_gpu_ids", ()),
        trainer=names.get("trainer_gpu_ids", ()),
        teacher=names.get("teacher_gpu_ids", ()),
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
    """Return each role's share of GPU memory, where roles use the same GPUs."""
    inference_gpus, teacher_gpus, trainer_gpus = set(shares.inference), set(shares.teacher), set(shares.trainer)
    inference = 1.0 if inference_gpus.isdisjoint(trainer_gpus | teacher_gpus) else SHARED_GPU_MEMORY
    if _sleeps(config) and config.trainer.model.fsdp_cpu_offload and teacher_gpus.isdisjoint(inference_gpus):
        # The server needs only leave what the trainer keeps on the GPU between two steps: with offload, nothing but its context.
        inference = round(1 - _CONTEXT_MEMORY, 3)
    teacher = 1.0 if teacher_gpus.isdisjoint(trainer_gpus | inference_gpus) else SHARED_TEACHER_MEMORY
    if config.inference is not None:
        inference = min(config.inference.gpu_memory_utilization, inference)
    if config.teacher_inference is not None:
        teacher = min(config.teacher_inference.gpu_memory_utilization, teacher)
    taken = [0.0 if _sleeps(config) else inference] if config.inference and not inference_gpus.isdisjoint(trainer_gpus) else []
    taken += [teacher] if config.teacher_inference and not teacher_gpus.isdisjoint(trainer_gpus) else []
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


def _check_ids(key: str, ids: Sequence[int], num_gpus: int) -> None:
    missing = [index for index in ids if not 0 <= index < num_gpus]
    if missing or not ids or len(set(ids)) != len(ids):
        problem = f"GPU {', '.join(map(str, missing))} does not exist" if missing else "each GPU once, and at least one"
        raise ConfigError(
            f"{key} = {list(ids)}: {problem}; this machine shows {num_gpus} GPU(s), ids 0 to {num_gpus - 1} "
            "(CUDA_VISIBLE_DEVICES counts); change the ids"
        )
