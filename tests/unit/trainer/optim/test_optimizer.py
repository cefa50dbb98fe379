import pytest
import torch

from trivet.config.schema.trainer import (
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    MuonConfig,
    OptimizerConfig,
    ScheduleConfig,
    SGDConfig,
)
from trivet.errors import ConfigError
from trivet.trainer.optim.optimizer import LearningRate, clip_gradients, gradient_norm, make_optimizer, state_bytes


@pytest.mark.parametrize(
    ("peak", "schedule", "max_steps", "expected"),
    [
        (
            1e-3,
            LinearSchedule(warmup_steps=2, decay_steps=4, min_lr=1e-4),
            10,
            {1: 5e-4, 2: 1e-3, 6: 1e-3, 8: 5.5e-4, 10: 1e-4},
        ),
        (1e-3, CosineSchedule(warmup_steps=0, min_lr=1e-4), 8, {4: 5.5e-4, 8: 1e-4}),
        (2e-6, ConstantSchedule(), None, {1: 2e-6, 10**6: 2e-6}),
        (0.0, LinearSchedule(min_lr=1e-4), 20, {20: 0.0}),
    ],
    ids=["linear", "cosine", "constant needs no end", "a peak of zero stays zero"],
)
def test_a_schedule_goes_from_its_peak_to_the_minimum(
    peak: float, schedule: ScheduleConfig, max_steps: int | None, expected: dict[int, float]
) -> None:
    rate = LearningRate(peak=peak, schedule=schedule, max_steps=max_steps)
    assert [rate.at(step) for step in expected] == pytest.approx(list(expected.values()))


def test_a_schedule_with_an_end_needs_max_steps() -> None:
    with pytest.raises(ConfigError, match=r'scheduler\.type = "linear" ends at max_steps'):
        LearningRate(peak=1e-3, schedule=LinearSchedule(), max_steps=None)


def test_norm_is_over_all_gradients_and_clipping_scales_them_alike(world) -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    norm = float(gradient_norm(gradients, world))
    assert norm == pytest.approx(5.0)
    clip_gradients(gradients, norm=norm, max_norm=1.0)
    assert [gradient.flatten().tolist() for gradient in gradients] == [pytest.approx([0.6, 0.0]), pytest.approx([0.8])]


def test_a_small_gradient_is_not_scaled_up(world) -> None:
    gradients = [torch.tensor([0.3])]
    clip_gradients(gradients, norm=0.3, max_norm=1.0)
    clip_gradients(gradients, norm=0.3, max_norm=None)
    assert gradients[0].item() == pytest.approx(0.3)


def test_an_update_follows_the_configured_adamw() -> None:
    config = AdamWConfig(lr=0.1, betas1=0.5, betas2=0.25, eps=1e-3, weight_decay=0.2)
    weight = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = make_optimizer([weight], config)
    first, second, expected = [0.0, 0.0], [0.0, 0.0], [2.0, -1.0]
    for step, gradient in enumerate(([1.0, -3.0], [0.5, 2.0]), start=1):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        for i, g in enumerate(gradient):
            first[i] = 0.5 * first[i] + 0.5 * g
            second[i] = 0.25 * second[i] + 0.75 * g * g
            update = (first[i] / (1 - 0.5**step)) / ((second[i] / (1 - 0.25**step)) ** 0.5 + 1e-3)
            expected[i] += -0.1 * 0.2 * expected[i] - 0.1 * update
    assert weight.tolist() == pytest.approx(expected, rel=1e-5)


def test_an_update_follows_the_configured_sgd() -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    optimizer = make_optimizer([weight], SGDConfig(lr=0.1, momentum=0.5, nesterov=False, weight_decay=0.0))
    for _ in range(2):
        weight.grad = torch.tensor([1.0, -2.0])
        optimizer.step()
    assert weight.tolist() == pytest.approx([2.0 - 0.1 - 0.15, -1.0 + 0.2 + 0.3])


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match="set nesterov = false or momentum above 0"):
        SGDConfig(momentum=0.0)


def muon_in_float64(weight: torch.Tensor, gradients: list[torch.Tensor], config: MuonConfig) -> torch.Tensor:
    weight, momentum = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    for gradient in gradients:
        momentum = config.mu * momentum + (1 - config.mu) * gradient
        ahead = config.mu * momentum + (1 - config.mu) * gradient
        left, values, right = torch.linalg.svd(ahead, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        size = 0.2 * max(weight.shape) ** 0.5
        weight = weight * (1 - config.lr * config.weight_decay) - config.lr * size * left @ torch.diag(values) @ right
    return weight


def test_muon_turns_matrices_as_its_formula_on_singular_values_says_and_the_rest_as_adamw() -> None:
    torch.manual_seed(0)
    config = MuonConfig(lr=0.1, weight_decay=0.1)
    tall, wide, vector, other = (torch.nn.Parameter(torch.ones(*shape)) for shape in ((6, 4), (3, 8), (5,), (5,)))
    joined = make_optimizer([tall, vector, wide], config, matrices=[tall, wide])
    adamw = torch.optim.AdamW([other], lr=0.1, weight_decay=0.1, betas=(0.9, 0.95))
    gradients: dict[torch.nn.Parameter, list[torch.Tensor]] = {tall: [], wide: []}
    for _ in range(3):
        for matrix, seen in gradients.items():
            matrix.grad = torch.randn_like(matrix)
            seen.append(matrix.grad.double())
        vector.grad = torch.randn_like(vector)
        other.grad = vector.grad.clone()
        joined.step()
        adamw.step()
        joined.load_state_dict(joined.state_dict())  # as after a resume
    for matrix, seen in gradients.items():
        expected = muon_in_float64(torch.ones(matrix.shape), seen, config)
        # Torch's Muon iterates in bfloat16, which has 8 bits.
        assert float((matrix.double() - expected).detach().norm() / (expected - 1).norm()) < 0.02
    torch.testing.assert_close(vector, other)


def test_muon_updates_matrices_as_torchs_own_does() -> None:
    torch.manual_seed(0)
    ours, reference = (torch.nn.Parameter(torch.ones(16, 8)) for _ in range(2))
    joined = make_optimizer([ours], MuonConfig(lr=0.1, weight_decay=0.2, mu=0.9), matrices=[ours])
    torchs = torch.optim.Muon([reference], lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn_like(ours)
        reference.grad = ours.grad.clone()
        joined.step()
        torchs.step()
    torch.testing.assert_close(ours, reference)


def test_muon_leaves_a_matrix_without_gradient_alone_and_takes_one_of_zeros() -> None:
    unused, still = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    still.grad = torch.zeros_like(still)
    make_optimizer([unused, still], MuonConfig(lr=0.1, weight_decay=0.0), matrices=[unused, still]).step()
    assert unused.tolist() == still.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "config",
    [AdamWConfig(), SGDConfig(), SGDConfig(momentum=0.0, nesterov=False), MuonConfig()],
    ids=lambda config: config.type,
)
def test_the_size_of_the_state_is_foreseen(config: OptimizerConfig) -> None:
    parameters = [torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(5))]
    optimizer = make_optimizer(parameters, config, matrices=parameters[:1])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if value is not None and value.numel() > 1]
    assert state_bytes(parameters, config, matrices=parameters[:1]) == sum(value.nbytes for value in kept)
