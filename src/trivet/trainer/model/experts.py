"""Watches and directs the routers of a mixture of experts: counts tokens per expert, and replays the experts that a server chose.

Used by `trainer.model.policy_model` for models whose blocks give their tokens to a module `experts`, as transformers' do. A server
and the trainer round differently, so their routers choose different experts for some tokens, whose log-probabilities then differ
by far more than rounding. With the server's choice replayed they agree again. The routers still compute the weights of the chosen
experts, so their gradient stays.

Source: W. Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", 2025.
Legend: U tokens to compute, L blocks of the model, E experts of a block, K experts of a token.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from trivet.errors import ConfigError
from trivet.trainer.model.blocks import find_blocks
from trivet.trainer.ranks.world import World, sum_over_ranks

Forward = Callable[..., Any]


@dataclass(slots=True, kw_only=True)
class _Mixture:
    """The experts of one block."""

    block_index: int
    router: torch.nn.Module
    """The module that chooses experts and calls them."""
    experts: torch.nn.Module
    num_experts: int
    counts_E: torch.Tensor
    """int64: tokens of each expert since the counts were last taken."""


class ExpertRouting:
    """The routing of all mixtures of a model. A model without experts has no mixtures, and every method does nothing.

    `replay` sets the experts for the forward pass of a row and for its backward pass, which may compute blocks again. So rows with
    such experts are computed one after the other.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """Wrap the mixtures of `causal_lm`. Their modules keep their names."""
        self._mixtures = [
            _Mixture(
                block_index=index,
                router=module,
                experts=experts,
                num_experts=num_experts,
                counts_E=torch.zeros(num_experts, dtype=torch.int64),
            )
            for index, block in enumerate(find_blocks(causal_lm))
            for module in block.modules()
            if (experts := find_experts(module)) is not None and (num_experts := int(experts.num_experts))  # type: ignore[arg-type]
        ]
        self._experts_ULK: torch.Tensor | None = None
        self._lock = threading.Lock()
        for mixture in self._mixtures:
            mixture.router.forward = self._wrap_router(mixture, mixture.router.forward)
            mixture.experts.forward = self._wrap_experts(mixture, mixture.experts.forward)

    @property
    def has_experts(self) -> bool:
        """True if the model has a mixture of experts."""
        return bool(self._mixtures)

    def replay(self, experts_ULK: torch.Tensor | None) -> None:
        """Use these experts in the next passes; None: the model's routers choose."""
        self._experts_ULK = experts_ULK

    def to(self, device: torch.device) -> None:
        """Move the counts to the device of the model."""
        for mixture in self._mixtures:
            mixture.counts_E = mixture.counts_E.to(device)

    def take_shares(self, world: World) -> dict[str, np.ndarray]:
        """Return how evenly the training passes since the last call used the experts: by metric, a value per mixture. Collective.

        Tokens without a sample count too: two of a dummy row, and those that make the tokens of a row divisible by `model.cp`.
        Rank 0 has the result, any other rank has an empty one.
        """
        if not self._mixtures:
            return {}
        counts = [sum_over_ranks(world, mixture.counts_E).double().cpu().numpy() for mixture in self._mixtures]
        for mixture in self._mixtures:
            mixture.counts_E.zero_()
        used = [counts_E for counts_E in counts if counts_E.sum()]
        return describe_shares(used) if world.is_main and used else {}

    def _wrap_router(self, mixture: _Mixture, forward: Forward) -> Forward:
        @torch.compiler.disable
        def run_replayed(*args: Any, **kwargs: Any) -> Any:
            assert self._experts_ULK is not None
            if mixture.block_index >= self._experts_ULK.shape[1]:
                raise ConfigError(
                    f"trainer.router_replay: the server returned experts of {self._experts_ULK.shape[1]} blocks, and block "
                    f"{mixture.block_index} of the model has experts; trainer and server must use the same model"
                )
            choice = _ForcedChoice(self._experts_ULK[:, mixture.block_index], num_experts=mixture.num_experts)
            with choice:
                result = forward(*args, **kwargs)
            if not choice.was_used:
                raise ConfigError(
                    f"trainer.router_replay does not work with {type(mixture.router).__name__}, which chooses experts in a way of "
                    "its own; set trainer.router_replay = false"
                )
            return result

        def run(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if self._experts_ULK is None else run_replayed(*args, **kwargs)

        return run

    def _wrap_experts(self, mixture: _Mixture, forward: Forward) -> Forward:
        @wraps(forward)
        def run(hidden_UH: torch.Tensor, chosen_UK: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._count(mixture, chosen_UK.detach().flatten())
            return forward(hidden_UH, chosen_UK, *args, **kwargs)

        return run

    def _count(self, mixture: _Mixture, chosen: torch.Tensor) -> None:
        if torch.compiler.is_compiling():  # a compiled model is computed by one thread
            mixture.counts_E.scatter_add_(0, chosen, torch.ones_like(chosen))
            return
        with self._lock:
            mixture.counts_E.scatter_add_(0, chosen, torch.ones_like(chosen))


class _ForcedChoice(TorchFunctionMode):
    """A context in which the top K of the scores of all experts are the given experts, with their scores.

    Routers of all families take the K highest of scores [U, E], in some families after they ruled out groups of experts. Then they
    compute weights from the scores of the chosen experts.
    """

    def __init__(self, chosen_UK: torch.Tensor, *, num_experts: int) -> None:
        super().__init__()
        self._chosen_UK = chosen_UK
        self._num_experts = num_experts
        self.was_used = False

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call `func`; replace the result of the top K of all experts."""
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2 or args[0].shape[1] != self._num_experts:
            return result
        values, indices = result
        if indices.shape != self._chosen_UK.shape:
            raise ConfigError(
                f"trainer.router_replay: the server returned {self._chosen_UK.shape[1]} experts a token, the model takes "
                f"{indices.shape[1]}; trainer and server must use the same model"
            )
        self.was_used = True
        indices = torch.where(self._chosen_UK >= 0, self._chosen_UK, indices)
        return args[0].gather(1, indices).to(values.dtype), indices


def find_experts(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the child `experts` of `module` if its `forward` takes tokens, the experts chosen for each, and their weights."""
    experts = getattr(module, "experts", None)
    if not isinstance(experts, torch.nn.Module) or not hasattr(experts, "num_experts"):
        return None
    return experts if len(inspect.signature(experts.forward).parameters) == 3 else None


def describe_shares(counts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return entropy, largest share and load of the tokens of each mixture's experts, by the name of the metric.

    Args:
        counts: for each mixture tokens [E], not all 0.
    """
    shares = [counts_E / counts_E.sum() for counts_E in counts]
    entropies = [-(share_E * np.log(np.maximum(share_E, 1e-30))).sum() / np.log(len(share_E)) for share_E in shares]
    return {
        "experts/entropy": np.array(entropies),
        "experts/largest_share": np.array([share_E.max() for share_E in shares]),
        "experts/load": np.array([share_E.max() * len(share_E) for share_E in shares]),
    }
