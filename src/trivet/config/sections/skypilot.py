"""Section for a command that machines of a cloud carry out, as one task of SkyPilot."""

from typing import Any

from pydantic import Field, model_validator

from trivet.config.sections.base import MAX_PROCESSES, Section
from trivet.config.sections.remote import JobName, RemotePath, Variable, require_no_secrets


class SkyPilotConfig(Section):
    """The table that has a command written as a task to output_dir/skypilot. The user starts it with `sky jobs launch`."""

    working_dir: RemotePath
    """Directory in which the nodes run the command; output_dir and other relative paths are relative to it. It must be on a volume
    that all nodes share and that outlives them, which task_overrides names."""
    name: JobName = "trivet"
    """Name of the task."""
    accelerator: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$")
    """Kind of the GPUs, such as `H100`; needed unless the run is one on CPUs."""
    gpus_per_node: int | None = Field(default=None, ge=0, le=MAX_PROCESSES)
    """GPUs of each node; unset: those that the configuration names. 0 for a run on CPUs."""
    cpus: int | None = Field(default=None, ge=1)
    """Fewest cores of a node; unset: what SkyPilot chooses."""
    memory_gb: int | None = Field(default=None, ge=1)
    """Least memory of a node, in GB; unset: what SkyPilot chooses."""
    image: str | None = Field(default=None, min_length=1)
    """Container image with trivet in it, such as one built from scripts/Dockerfile. Unset: setup installs trivet."""
    setup: str | None = Field(default=None, min_length=1)
    """Shell text that prepares a node before the command; unset: nothing."""
    python: str = Field(default="python", min_length=1)
    """The interpreter on the nodes."""
    file_mounts: dict[str, Any] = {}
    """Files and buckets that the nodes get, as SkyPilot spells them."""
    env: dict[Variable, str] = {}
    """Environment variables of the nodes. The task shows them, so names that sound like a secret's are refused."""
    secrets: list[Variable] = []
    """Environment variables whose values `sky jobs launch --secret NAME` takes from where it is typed."""
    task_overrides: dict[str, Any] = {}
    """Merged last into the task, for what has no key here. Tables are merged key by key, and lists of tables that all have
    a `name` by name; other lists are replaced."""

    @model_validator(mode="after")
    def _variables_fit(self) -> "SkyPilotConfig":
        require_no_secrets(self.env, given=self.secrets, instead='secrets = ["{}"]')
        return self
