"""Provides every name of vLLM that trivet uses. No other module imports vLLM, so one file shows what a new release may break.

Nearly all of these names are private to vLLM, which moves and renames them between releases without notice.
`tests/unit/inference/test_vllm_names.py` looks up each name and its attributes, and reports a missing one.

A name is imported from vLLM when it is first used here: a worker of the engine uses few of them and must not import the API server.
The imports below are for type checkers. At run time the module reads them from its own source, as a table (`MODULE_BY_NAME`).
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet.errors import InferenceError

if TYPE_CHECKING:
    from vllm.config import VllmConfig as VllmConfig
    from vllm.distributed import get_tensor_model_parallel_rank as get_tensor_model_parallel_rank
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector as get_aux_output_connector
    from vllm.distributed.weight_transfer.base import WeightTransferEngine as WeightTransferEngine
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo as WeightTransferInitInfo
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest as WeightTransferInitRequest
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo as WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as WeightTransferEngineFactory
    from vllm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state as init_app_state
    from vllm.entrypoints.launchers.app import build_app as build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser as make_arg_parser
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args as validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import serve_http as serve_http
    from vllm.entrypoints.launchers.launcher import setup_server as setup_server
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse as ChatCompletionResponse
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat as OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse as CompletionResponse
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion as OpenAIServingCompletion
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels as OpenAIServingModels
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTextChoice as GenerateTextChoice
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTextResponse as GenerateTextResponse
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensChoice as GenerateTokensChoice
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse as GenerateTokensResponse
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens as ServingTokens
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse as ErrorResponse
    from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest as LoadLoRAAdapterRequest
    from vllm.inputs import TokensPrompt as TokensPrompt
    from vllm.lora.layers import LogitsProcessorWithLoRA as LogitsProcessorWithLoRA
    from vllm.lora.request import LoRARequest as LoRARequest
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead as ParallelLMHead
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload as finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload as initialize_layerwise_reload
    from vllm.model_executor.models import ModelRegistry as ModelRegistry
    from vllm.outputs import RequestOutput as RequestOutput
    from vllm.platforms import current_platform as current_platform
    from vllm.renderers import ChatParams as ChatParams
    from vllm.renderers import merge_kwargs as merge_kwargs
    from vllm.renderers.online_renderer import OnlineRenderer as OnlineRenderer
    from vllm.sampling_params import RequestOutputKind as RequestOutputKind
    from vllm.sampling_params import SamplingParams as SamplingParams
    from vllm.usage.usage_lib import UsageContext as UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser
    from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
    from vllm.v1.engine import EngineCoreRequest as EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
    from vllm.v1.engine.output_processor import OutputProcessorOutput as OutputProcessorOutput
    from vllm.v1.engine.output_processor import RequestOutputCollector as RequestOutputCollector
    from vllm.v1.executor.abstract import Executor as Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor as MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor as UniProcExecutor
    from vllm.v1.sample.rejection_sampler import apply_sampling_constraints as apply_sampling_constraints

MODULE_BY_NAME = {
    alias.name: node.module or ""
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
    for alias in node.names
}
"""The module of each name, read from the import statements above."""

if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept any name

    def __getattr__(name: str) -> Any:
        """Import `name` from vLLM.

        Raises:
            InferenceError: the installed vLLM does not have it.
        """
        if name not in MODULE_BY_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = MODULE_BY_NAME[name]
        try:
            value = getattr(importlib.import_module(module), name)
        except (AttributeError, ModuleNotFoundError) as exc:
            raise InferenceError(f"the installed vLLM has no {module}.{name}, which trivet uses: {exc}") from exc
        globals()[name] = value  # Python calls this function only for names that are not in globals()
        return value
