"""Runs environments that are written for any generation of the verifiers API.

`load_host` chooses the adapter by the release of verifiers that is installed. Each adapter imports verifiers in modules of its own,
so that this package can be imported without it. Nothing here may import pydantic, httpx, torch or transformers itself: an
environment's process has msgspec, numpy, and what its environment brings.
"""

from collections.abc import Mapping

from trivet.environments.apis.host import EnvironmentHost
from trivet.environments.apis.release import FIRST_WITH_V1_ALONE, require_release
from trivet.environments.workers.stages import StageBoard
from trivet.wire.workers import HostSettings


def load_host(settings: HostSettings, *, environ: Mapping[str, str], stages: StageBoard | None = None) -> EnvironmentHost:
    """Load the environment that `settings` name. Call it on the main thread: verifiers installs signal handlers.

    Args:
        environ: has the servers' keys.
        stages: records what each group is doing.

    Raises:
        EnvironmentLoadError: verifiers or the package is not installed, or the package's own code raised.
    """
    release = require_release(settings.env_id)
    if release >= FIRST_WITH_V1_ALONE:
        from trivet.environments.apis.v1.load import load
    else:
        from trivet.environments.apis.v0.load import load
    return load(settings, environ=environ, stages=stages or StageBoard())
