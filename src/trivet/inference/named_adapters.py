"""Serves adapters under names of their own: a request that gives such a name as its `model` is answered by that adapter."""

from collections.abc import Sequence
from pathlib import Path

from trivet.errors import WeightsError
from trivet.inference.vllm_names import ErrorResponse, LoadLoRAAdapterRequest, OpenAIServingModels
from trivet.inference.weight_roots import require_below


class NamedAdapters:
    """Implements `routes.AdapterLoader` with vLLM's registry of models."""

    def __init__(self, models: OpenAIServingModels, *, roots: Sequence[Path]) -> None:
        self._models = models
        self._roots = roots

    async def load(self, name: str, *, path: Path) -> None:
        """See `routes.AdapterLoader`."""
        require_below(self._roots, path)
        answer = await self._models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=name, lora_path=str(path), load_inplace=True)
        )
        if isinstance(answer, ErrorResponse):
            raise WeightsError(f"{path} cannot be served as {name!r}: {answer.error.message}")
