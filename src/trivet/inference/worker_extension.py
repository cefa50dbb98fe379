"""What the API server can ask of every vLLM worker, by `collective_rpc`. vLLM makes it a base of its worker class."""

import os
from typing import Any

from trivet.inference.lm_head_repack import repack_lm_heads


class PolicyWorkerExtension:
    model_runner: Any
    """The worker's own."""

    def load_policy(self, directory: str) -> None:
        """Replace the served weights by those in `directory`, in place."""
        self.reload_weights(weights_path=directory)  # type: ignore[attr-defined]  a method of the worker that this extends
        repack_lm_heads(self.model_runner.get_model())

    def ping(self) -> int:
        """The worker's process id: an answer proves that it is not stuck."""
        return os.getpid()
