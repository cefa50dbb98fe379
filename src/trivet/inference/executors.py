"""Makes vLLM's executors end with the API server. They run in the engine's process, which vLLM otherwise leaves behind."""

from trivet.inference.engine_process import end_with_api_server
from trivet.inference.vllm_names import MultiprocExecutor, UniProcExecutor


class OneProcessExecutor(UniProcExecutor):
    """Runs the worker in the engine's own process."""

    def _init_executor(self) -> None:
        end_with_api_server()
        super()._init_executor()


class ManyProcessExecutor(MultiprocExecutor):
    """Runs one worker process per rank; these end with the engine's process by themselves."""

    def _init_executor(self) -> None:
        end_with_api_server()
        super()._init_executor()
