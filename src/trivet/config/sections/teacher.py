"""`[orchestrator.teacher_model]`: the model whose log-probabilities of the sampled tokens the policy learns from."""

from pydantic import Field, model_validator

from trivet.config.sections.base import MAX_ROLLOUTS, Section
from trivet.config.sections.client import ClientConfig


class TeacherNameConfig(Section):
    """The teacher, as its server names it."""

    name: str
    """Name under which its server serves the teacher. Its tokenizer must be the policy's."""


class TeacherModelConfig(Section):
    """The teacher of on-policy distillation (trainer.loss.teacher_tau).

    It scores every finished group before the group can be trained on. A run with teacher_gpu_ids or [teacher_inference]
    starts its server and fills this section.
    """

    model: TeacherNameConfig
    client: ClientConfig = ClientConfig()
    max_concurrent: int = Field(default=64, ge=1, le=MAX_ROLLOUTS)
    """Samples that the teacher scores at one time, over all its servers."""

    @model_validator(mode="after")
    def _servers_are_named(self) -> "TeacherModelConfig":
        if self.client.elastic is not None:
            raise ValueError("client.elastic is for the policy's servers: name the teacher's in client.base_url")
        return self
