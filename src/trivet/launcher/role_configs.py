"""Derives the configuration that each role of a run reads: its ports, its GPUs, the servers it asks and the step it resumes from.

Pure. Called by `launcher.plan`, which knows the machine.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

from trivet.checkpoints.settings import EVERY_KEY
from trivet.config.check_roles import tensor_parallel_problem
from trivet.config.resolve import LOCAL_HOSTS
from trivet.config.schema.inference import ClientConfig, InferenceConfig, ServerConfig
from trivet.config.schema.orchestrator import OrchestratorConfig
from trivet.config.schema.rl import RLConfig
from trivet.config.schema.shared import CkptConfig, RunIdentity
from trivet.config.schema.trainer import TrainerConfig
from trivet.errors import ConfigError

SERVER_KEY, TEACHER_KEY = "INFERENCE_SERVER_KEY", "TEACHER_SERVER_KEY"
"""Variables by which the orchestrator gets `server.api_key` of the servers that the run starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports on which the processes of a run listen."""

    inference: int
    transport: int
    teacher: int = 0
    """0 when the run starts no teacher."""


def server_config(
    server: InferenceConfig | None, run: RunIdentity, *, name: str, port: int, num_gpus: int, share: float
) -> InferenceConfig | None:
    """Return the configuration of a server that the run starts; None when it starts none.

    Args:
        name: `inference` or `teacher`, as in the names of its keys.
        num_gpus: GPUs that it gets; 0 on the CPU.
        share: largest share of a GPU's memory that it may take.

    Raises:
        ConfigError: its parallel layout does not fit the number of GPUs.
    """
    if server is None:
        return None
    return server.model_copy(
        update={
            "run": run,
            "server": server.server.model_copy(update={"port": port}),
            "parallel": server.parallel.model_copy(update={"dp": _replicas(server, num_gpus, name=name)}),
            "gpu_memory_utilization": min(server.gpu_memory_utilization, share),
        }
    )


def _replicas(inference: InferenceConfig, num_gpus: int, *, name: str) -> int:
    section = "inference" if name == "inference" else f"{name}_inference"
    tp, dp = inference.parallel.tp, inference.parallel.dp
    if num_gpus == 0:
        return dp
    if problem := tensor_parallel_problem(tp, num_gpus=num_gpus, key=f"{section}.parallel.tp", gpu_ids=f"{name}_gpu_ids"):
        raise ConfigError(problem)
    if dp not in (1, num_gpus // tp):
        raise ConfigError(
            f"{section}.parallel.dp ({dp}) must be GPUs / tp = {num_gpus} / {tp} = {num_gpus // tp}; leave it out"
        )
    return num_gpus // tp


def orchestrator_config(config: RLConfig, run: RunIdentity, ports: Ports, resume_step: int | None) -> OrchestratorConfig:
    """Return what the orchestrator reads: the run, its ports, and the addresses of the servers that the run starts."""
    orchestrator = config.orchestrator
    client = orchestrator.client
    if config.inference is not None:
        client = _of_own_server(client, config.inference.server, port=ports.inference, key_variable=SERVER_KEY)
    teacher = orchestrator.teacher_model
    if config.teacher_inference is not None and teacher is not None:
        asked = _of_own_server(teacher.client, config.teacher_inference.server, port=ports.teacher, key_variable=TEACHER_KEY)
        teacher = teacher.model_copy(update={"client": asked})
    return orchestrator.model_copy(
        update={
            "run": run,
            "teacher_model": teacher,
            "client": client,
            "rollout_transport": orchestrator.rollout_transport.model_copy(update={"port": ports.transport}),
            "ckpt": _resumed(orchestrator.ckpt, resume_step),
        }
    )


def trainer_config(config: RLConfig, run: RunIdentity, ports: Ports, resume_step: int | None) -> TrainerConfig:
    """Return what the trainer reads: the run, its port, and the step that it resumes from."""
    trainer = config.trainer
    return trainer.model_copy(
        update={
            "run": run,
            "rollout_transport": trainer.rollout_transport.model_copy(update={"port": ports.transport}),
            "ckpt": _resumed(trainer.ckpt, resume_step),
        }
    )


def _resumed(ckpt: CkptConfig, resume_step: int | None) -> CkptConfig:
    """Return what a role is told: a fork resumes the checkpoint that it was given, under settings of its own."""
    update: dict[str, object] = {"resume_step": resume_step}
    if ckpt.resume_from is not None:
        update |= {"resume_from": None, "allow_changes": [EVERY_KEY]}
    return ckpt.model_copy(update=update)


def _of_own_server(client: ClientConfig, server: ServerConfig, *, port: int, key_variable: str) -> ClientConfig:
    """Return `client` for a server that this run starts on `port`."""
    update: dict[str, object] = {"base_url": [_with_port(url, configured=server.port, actual=port) for url in client.base_url]}
    if server.api_key is not None:
        update["api_key_var"] = [key_variable]
    return client.model_copy(update=update)


def _with_port(url: str, *, configured: int, actual: int) -> str:
    parts = urlsplit(url)
    if parts.hostname not in LOCAL_HOSTS or parts.port != configured:
        return url
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts._replace(netloc=f"{host}:{actual}").geturl()
