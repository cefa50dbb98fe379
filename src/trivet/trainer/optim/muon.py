"""Optimizes the matrices of a sharded model with Muon and the rest with AdamW, as one optimizer.

Called by `trainer.optim.optimizer`. torch.optim.Muon is not used: it orthogonalizes each rank's rows by themselves, and in
bfloat16, whose rounding makes weights depend on the number of ranks by 1e-4 after six steps.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # what an operation with async_op returns
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 in each iteration, from the source: they bring small singular values up fastest."""
_ITERATIONS = 5
"""Iterations of the source: singular values are near 1 after so many."""
_MIN_NORM = 1e-7
"""Least divisor of a matrix: a gradient of 0 stays 0."""


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Bring singular values near 1 (0.7 to 1.2), except those of 0, in the dtype of the matrix.

    Source: the quintic Newton-Schulz iteration of K. Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    linear, cubic, quintic = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=_MIN_NORM)
    with tf32_products():
        for _ in range(_ITERATIONS):
            gram = wide @ wide.T
            factor = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
            wide = torch.addmm(wide, factor, wide, beta=linear)
    return wide.T if is_tall else wide


@contextmanager
def tf32_products() -> Iterator[None]:
    """Let GPUs multiply float32 matrices with 10 bits of mantissa within the block; the CPU's products stay as they are.

    The iteration only has to come near 1, for which 7 bits are usual (bfloat16). True float32 has an eighth of the rate on an H100.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class WholeMatrixMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum. Each matrix is orthogonalized whole, by one of the ranks that it is sharded over.

    Momentum stays sharded. It is gathered matrix by matrix, each while the one before is orthogonalized, and each rank keeps the
    directions of the matrices that are its turn; then each rank sends the others their rows.

    Source: arXiv 2502.16982, section 2.2: updates as large as AdamW's, so that one learning rate serves both.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here evaluates a loss again
        """Update all matrices that have a gradient. Collective."""
        assert closure is None, "an update does not compute its loss again"
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            own_directions: dict[int, torch.Tensor] = {}
            gathered = _one_ahead(begin_gather(self._follow_gradient(matrix, group)) for matrix in matrices)
            for turn, (matrix, ahead) in enumerate(zip(matrices, gathered, strict=True)):
                whole = _await_gathered(ahead)  # on every rank
                if _is_own_turn(matrix, turn):
                    own_directions[turn] = orthogonalize(whole)
            for turn, matrix in enumerate(matrices):
                direction = _share(own_directions.pop(turn, None), turn, like=matrix)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(direction, alpha=-0.2 * math.sqrt(max(matrix.shape)) * group["lr"])

    def _follow_gradient(self, matrix: torch.nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Add this step's gradient to the momentum; return the momentum one step ahead, sharded like the matrix."""
        gradient = matrix.grad
        assert gradient is not None
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"])


def begin_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to gather the whole tensor on the device that computes, wherever the shards are kept. Collective.

    Returns:
        A tensor for `_await_gathered`.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    shards = tensor.to(mesh.device_type)
    assert isinstance(shards, DTensor)
    return shards.redistribute(placements=[Replicate()] * mesh.ndim, async_op=True)


def _await_gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `begin_gather` began to gather."""
    whole = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return whole.wait() if isinstance(whole, AsyncCollectiveTensor) else whole


def _one_ahead(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each tensor once the one after it has been made."""
    before: torch.Tensor | None = None
    for tensor in tensors:
        if before is not None:
            yield before
        before = tensor
    if before is not None:
        yield before


def _is_own_turn(matrix: torch.Tensor, turn: int) -> bool:
    """Tell whether this rank orthogonalizes the matrix: ranks of one copy of the model take turns, all copies alike."""
    if not isinstance(matrix, DTensor):
        return True
    return matrix.device_mesh.get_local_rank(-1) == turn % matrix.device_mesh.size(-1)


def _share(direction: torch.Tensor | None, turn: int, *, like: torch.Tensor) -> torch.Tensor:
    """Give each rank its rows of the direction that the rank in turn computed, sharded like the matrix. Collective."""
    if not isinstance(like, DTensor):
        assert direction is not None
        return direction
    mesh = like.device_mesh
    *_, shard = like.placements
    assert isinstance(shard, Shard)
    assert mesh.mesh_dim_names is not None
    if direction is None:
        direction = torch.empty(like.shape, dtype=like.dtype, device=mesh.device_type)
    copy = mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 else mesh
    rows = distribute_tensor(direction, copy, [shard], src_data_rank=turn % copy.size()).to_local()
    return DTensor.from_local(
        rows.to(like.to_local().device), mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimizers of different parameters, with one state and one list of groups: saved and loaded like one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here evaluates a loss again
        """Let each optimizer update its parameters."""
        assert closure is None, "an update does not compute its loss again"
        for part in self._parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the joint state and share it with each optimizer."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        place = 0
        for part in self._parts:
            end = place + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[place:end], self.state
            place = end
