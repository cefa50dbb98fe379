"""Makes vLLM return routed experts on a CPU, where vLLM 0.32 refuses `enable_return_routed_experts`.

vLLM collects them in its second model runner alone, which needs Triton, and Triton has no CPU backend. Everything else that takes
part works on a CPU too: the routers report their choice, and scheduler and output processor carry it. `accept_on_cpu` lifts the
refusal, and `ExpertCapture` makes the calls to vLLM's collector that the second model runner would make.

Both can go when a server on the CPU starts with `enable_return_routed_experts` without them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trivet.inference.vllm_names import VllmConfig, get_aux_output_connector


def accept_on_cpu() -> None:
    """Lift vLLM's refusal to return routed experts. May be called again.

    What it would refuse besides cannot be configured here, or is checked by `config.check_roles`.
    """
    VllmConfig._verify_aux_output_compatibility = lambda self: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTokens:
    """The tokens that a step computes, with the field names of the second model runner."""

    req_ids: list[str]
    num_computed_tokens_np: np.ndarray
    """int32: for each request its tokens before this step."""
    query_start_loc_np: np.ndarray
    """int64: where the tokens of each request begin in the step, and at last where the step ends."""


class ExpertCapture:
    """Collects the experts of every step of a worker's model runner.

    Each step consumes the scheduler's output and produces the experts of its requests in the runner's output, for the scheduler.
    """

    def __init__(self, runner: Any) -> None:
        """Wrap the two methods of `runner` that make a step. Its model is loaded, and its KV cache exists."""
        self._runner = runner
        self._connector: Any = get_aux_output_connector(runner.get_model(), runner.vllm_config, runner.kv_cache_config)
        self._pending: Any = None
        """The experts of the step whose tokens are not sampled yet."""
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = self._execute(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            batch = self._runner.input_batch
            counts = [scheduler_output.num_scheduled_tokens[request_id] for request_id in batch.req_ids]
            tokens = _StepTokens(
                req_ids=list(batch.req_ids),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
                query_start_loc_np=np.cumsum([0, *counts]),
            )
            self._pending = self._connector.prepare_output(tokens)
        return result

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample(*args, **kwargs)
        pending, self._pending = self._pending, None
        if pending is not None:
            num_sampled = np.array([len(token_ids) for token_ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output
