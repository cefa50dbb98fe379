"""Compare every loss with its formula in float64, and with exact expectations over a policy small enough to enumerate."""

import math
from itertools import product

import pytest
import torch
from pydantic import TypeAdapter

from trivet.config.schema.losses import PRESETS, LossConfig
from trivet.errors import ConfigError
from trivet.trainer.attention.packed import Segments
from trivet.trainer.losses.custom import SampleInputs, SampleLoss
from trivet.trainer.losses.formulas import make_policy_loss
from trivet.trainer.losses.terms import LossUnit
from trivet.trainer.model.logprobs import TokenScores
from trivet.trainer.rows import RowTensors

CPU = torch.device("cpu")
parse = TypeAdapter(LossConfig).validate_python


CHOSEN_BELOW = -1.2
"""The tokens of `clip_cov` and `kl_cov` that count as chosen: those with a smaller log-probability of the sampler."""


def make_row(sampler, advantages, reference=None, teacher=None, proximal=None) -> RowTensors:
    """Make a row of samples, each given by the sampler's log-probabilities of its loss tokens."""
    lengths = [len(sample) for sample in sampler]
    index = torch.zeros(sum(lengths), dtype=torch.int64)

    def flat(samples):
        return torch.tensor([value for sample in samples for value in sample], dtype=torch.float64)

    return RowTensors(
        token_ids_1U=index[None],
        position_ids_1U=index[None],
        segments=Segments.from_samples([len(index)], device=CPU),
        predictors_N=index,
        targets_N=index,
        temperatures_N=torch.ones(len(index)),
        sampler_logprobs_N=flat(sampler),
        advantages_N=flat([[advantage] * length for advantage, length in zip(advantages, lengths, strict=True)]),
        reference_logprobs_N=None if reference is None else flat(reference),
        teacher_logprobs_N=None if teacher is None else flat(teacher),
        proximal_logprobs_N=None if proximal is None else flat(proximal),
        chosen_N=flat(sampler) < CHOSEN_BELOW,
        samples_N=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        num_samples=len(lengths),
        num_loss_tokens_S=tuple(lengths),
    )


def total(row_loss, *, num_tokens, num_samples) -> torch.Tensor:
    counts = {LossUnit.TOKEN: num_tokens, LossUnit.SAMPLE: num_samples}
    return torch.stack([term / counts[unit] for unit, term in row_loss.terms.items()]).sum()


def distil(inputs: SampleInputs) -> SampleLoss:
    """A custom loss that learns from the teacher alone."""
    assert inputs.teacher_logprobs_L is not None
    gap = (inputs.teacher_logprobs_L - inputs.trainer_logprobs_L).detach()
    return SampleLoss(-(gap * inputs.trainer_logprobs_L).sum())


def reinforce(inputs: SampleInputs, *, scale: float) -> SampleLoss:
    """A custom loss as a user would write it."""
    ratio = (inputs.trainer_logprobs_L - inputs.sampler_logprobs_L).detach().exp()
    return SampleLoss(-(scale * ratio * inputs.advantages_L * inputs.trainer_logprobs_L).sum(), {"ratio": ratio})


def no_tensor(inputs: SampleInputs) -> float:
    return 0.0


# --- formulas --------------------------------------------------------------------------------------------------------------
# Each takes one sample's log-probabilities of the trainer (float64 scalars with gradient) and of the sampler, its advantage,
# and the numbers of tokens and samples in the step; it returns what the sample adds to the loss.


def by_token(term):
    def formula(trainer, sampler, advantage, num_tokens, num_samples):
        return sum(term(lp, q, advantage) for lp, q in zip(trainer, sampler, strict=True)) / num_tokens

    return formula


def stop(value: torch.Tensor) -> float:
    return value.item()


def distilled(lp, q, advantage):
    """The teacher finds each token 0.3 nats less likely than the sampler does."""
    d = stop(lp) - q
    is_kept = 0.125 <= math.exp(d) <= 8.0
    return -is_kept * math.exp(d) * (0.7 * advantage + 0.5 * ((q - 0.3) - stop(lp)) - 0.1 * d) * lp


def ppo(low, high, divide):
    def formula(trainer, sampler, advantage, num_tokens, num_samples):
        result = 0.0
        for lp, q in zip(trainer, sampler, strict=True):
            ratio = torch.exp(lp - q)
            bounded = min(max(ratio.item(), 1 - low), 1 + high)
            worst = ratio * advantage if ratio.item() * advantage <= bounded * advantage else bounded * advantage
            result = result - worst / divide(len(trainer), num_tokens, num_samples)
        return result

    return formula


def gspo(trainer, sampler, advantage, num_tokens, num_samples):
    ratio = torch.exp(sum(lp - q for lp, q in zip(trainer, sampler, strict=True)) / len(trainer))
    bounded = min(max(ratio.item(), 0.7), 1.4)
    worst = ratio * advantage if ratio.item() * advantage <= bounded * advantage else bounded * advantage
    return -worst / num_samples


def luspo(trainer, sampler, advantage, num_tokens, num_samples):
    return len(trainer) * gspo(trainer, sampler, advantage, num_tokens, num_samples)


def gmpo(trainer, sampler, advantage, num_tokens, num_samples):
    """Multiply the factors of the geometric mean one by one."""
    product = torch.ones((), dtype=torch.float64)
    for lp, q in zip(trainer, sampler, strict=True):
        ratio, low, high = torch.exp(lp - q), math.exp(-0.3), math.exp(0.4)
        bounded = min(max(ratio.item(), low), high)
        takes_ratio = ratio.item() * advantage <= bounded * advantage
        product = product * (ratio if takes_ratio else bounded)
    return -(product ** (1 / len(trainer))) * advantage / num_samples


def sapo(divide):
    def formula(trainer, sampler, advantage, num_tokens, num_samples):
        tau = 1.0 if advantage > 0 else 1.3
        gates = [4 / tau / (1 + torch.exp(-tau * (torch.exp(lp - q) - 1))) for lp, q in zip(trainer, sampler, strict=True)]
        return -advantage * sum(gates) / divide(len(trainer), num_tokens, num_samples)

    return formula


def vespo(trainer, sampler, advantage, num_tokens, num_samples):
    product = math.prod(math.exp(stop(lp) - q) for lp, q in zip(trainer, sampler, strict=True))
    k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    return -(product**k) * math.exp(decay - decay * product) * advantage * sum(trainer) / num_tokens


def clip_cov(lp, q, advantage):
    ratio = torch.exp(lp - q)
    bounded = min(max(ratio.item(), 0.8), 1.28)
    worst = ratio * advantage if ratio.item() * advantage <= bounded * advantage else bounded * advantage
    return 0.0 if q < CHOSEN_BELOW else -worst


def kl_cov(lp, q, advantage):
    return -torch.exp(lp - q) * advantage + (0.7 * abs(lp - q) if q < CHOSEN_BELOW else 0.0)


def corrected(weigh, *, proximal=False, divide=lambda length, tokens, samples: tokens):
    """`weigh` takes the ratios of a sample and returns the weight of each token."""

    def formula(trainer, sampler, advantage, num_tokens, num_samples):
        behind = [q + PROXIMAL if proximal else stop(lp) for lp, q in zip(trainer, sampler, strict=True)]
        weights = weigh([math.exp(own - q) for own, q in zip(behind, sampler, strict=True)])
        result = 0.0
        for weight, lp, own in zip(weights, trainer, behind, strict=True):
            ratio = torch.exp(lp - own)
            bounded = min(max(ratio.item(), 0.7), 1.2)
            worst = ratio * advantage if ratio.item() * advantage <= bounded * advantage else bounded * advantage
            result = result - weight * (worst if proximal else advantage * lp)
        return result / divide(len(trainer), num_tokens, num_samples)

    return formula


def whole(ratios, weight):
    return [weight(math.prod(ratios))] * len(ratios)


def geometric(ratios, low, high, weights):
    mean = math.prod(ratios) ** (1 / len(ratios))
    return weights if low <= mean <= high else [0.0] * len(ratios)


PROXIMAL = 0.25
"""The proximal policy's log-probabilities minus the sampler's."""


def dppo(lp, q, advantage):
    moved = math.exp(stop(lp)) - math.exp(q)
    is_masked = moved > 0.2 if advantage > 0 else moved < -0.1
    return -(not is_masked) * 0.5 * advantage * torch.exp(lp - q) + 0.01 * (lp - q) ** 2


def ipo(lp, q, advantage):
    keep = abs(math.exp(stop(lp)) - math.exp(q)) <= 0.15
    return -keep * 2.0 * advantage * torch.exp(lp - q) + 0.03 * (lp - q) ** 2


def sequence_default(trainer, sampler, advantage, num_tokens, num_samples):
    log_ratios = [stop(lp) - q for lp, q in zip(trainer, sampler, strict=True)]
    kept = [0.125 <= math.exp(d) <= 8.0 for d in log_ratios]
    if not 0.1 <= math.exp(sum(log_ratios) / len(log_ratios)) <= 10 or max(map(math.exp, log_ratios)) > 100:
        return torch.zeros((), dtype=torch.float64)
    rho = min(math.exp(min(sum(log_ratios), 10.0)), 10.0)
    terms = [-k * rho * (advantage - 0.1 * d) * lp for k, d, lp in zip(kept, log_ratios, trainer, strict=True)]
    return sum(terms) / len(trainer) / num_samples


FORMULAS = {
    "default, sequence": ({"type": "default", "ratio_type": "sequence", "kl_tau": 0.1}, sequence_default),
    "default, with a teacher": (
        {"type": "default", "adv_tau": 0.7, "teacher_tau": 0.5, "kl_tau": 0.1, "geo_mask_low": 0.0, "geo_mask_high": 1e9},
        by_token(distilled),
    ),
    "cispo": (
        {"type": "cispo", "clip_low": 0.4, "clip_high": 0.5},
        by_token(lambda lp, q, a: -min(max(math.exp(stop(lp) - q), 0.6), 1.5) * a * lp),
    ),
    "aipo": ({"type": "aipo", "clip_ratio": 1.3}, by_token(lambda lp, q, a: -min(math.exp(stop(lp) - q), 1.3) * a * lp)),
    "grpo": ({"type": "grpo", "clip_high": 0.28}, ppo(0.2, 0.28, lambda length, tokens, samples: tokens)),
    "grpo, sample": (
        {"type": "grpo", "normalization": "sample"},
        ppo(0.2, 0.2, lambda length, tokens, samples: length * samples),
    ),
    "grpo, constant": (
        {"type": "grpo", "normalization": "constant", "normalization_length": 7},
        ppo(0.2, 0.2, lambda length, tokens, samples: 7 * samples),
    ),
    "gspo": ({"type": "gspo", "clip_low": 0.3, "clip_high": 0.4}, gspo),
    "luspo": ({"type": "luspo", "clip_low": 0.3, "clip_high": 0.4}, luspo),
    "gmpo": ({"type": "gmpo", "clip_low": 0.3}, gmpo),
    "sapo": ({"type": "sapo", "tau_neg": 1.3}, sapo(lambda length, tokens, samples: length * samples)),
    "sapo, token": (
        {"type": "sapo", "tau_neg": 1.3, "normalization": "token"},
        sapo(lambda length, tokens, samples: tokens),
    ),
    "vespo": ({"type": "vespo"}, vespo),
    "clip_cov": ({"type": "clip_cov", "clip_low": 0.2, "clip_high": 0.28}, by_token(clip_cov)),
    "kl_cov": ({"type": "kl_cov", "kl_coef": 0.7}, by_token(kl_cov)),
    "token_tis": ({"type": "importance"}, corrected(lambda ratios: [min(r, 2.0) for r in ratios])),
    "sequence_tis": (
        {"type": "importance", "preset": "sequence_tis"},
        corrected(lambda ratios: whole(ratios, lambda product: min(product, 2.0))),
    ),
    "token_mis": (
        {"type": "importance", "preset": "token_mis", "high": 1.5, "normalization": "sample"},
        corrected(lambda ratios: [r * (r <= 1.5) for r in ratios], divide=lambda length, tokens, samples: length * samples),
    ),
    "sequence_mis": (
        {"type": "importance", "preset": "sequence_mis"},
        corrected(lambda ratios: whole(ratios, lambda product: product * (0.5 <= product <= 2.0))),
    ),
    "icepop": (
        {"type": "importance", "preset": "icepop", "high": 1.8},
        corrected(lambda ratios: [r * (0.5 <= r <= 1.8) for r in ratios]),
    ),
    "geometric": (
        {"type": "importance", "preset": "geometric", "geo_low": 0.8, "geo_high": 1.3},
        corrected(lambda ratios: geometric(ratios, 0.8, 1.3, [1.0] * len(ratios))),
    ),
    "geometric_token_tis": (
        {"type": "importance", "preset": "geometric_token_tis", "high": 1.1, "geo_low": 0.8, "geo_high": 1.3},
        corrected(lambda ratios: geometric(ratios, 0.8, 1.3, [min(r, 1.1) for r in ratios])),
    ),
    "geometric_sequence_tis": (
        {"type": "importance", "preset": "geometric_sequence_tis", "low": 0.7, "high": 1.1, "geo_low": 0.6, "geo_high": 1.6},
        corrected(lambda ratios: geometric(ratios, 0.6, 1.6, whole(ratios, lambda product: min(max(product, 0.7), 1.1)))),
    ),
    "decoupled": (
        {"type": "decoupled", "clip_low": 0.3, "high": 5.0},
        corrected(lambda ratios: [r * (r <= 5.0) for r in ratios], proximal=True),
    ),
    "decoupled, sequence_tis": (
        {
            "type": "decoupled",
            "preset": "sequence_tis",
            "clip_low": 0.3,
            "normalization": "constant",
            "normalization_length": 7,
        },
        corrected(
            lambda ratios: whole(ratios, lambda product: min(product, 2.0)),
            proximal=True,
            divide=lambda length, tokens, samples: 7 * samples,
        ),
    ),
    "dppo": ({"type": "dppo", "dppo_mask_low": 0.1, "adv_tau": 0.5, "kl_tau": 0.01}, by_token(dppo)),
    "ipo": ({"type": "ipo", "ipo_threshold": 0.15, "adv_tau": 2.0, "kl_tau": 0.03}, by_token(ipo)),
    "custom": (
        {"type": "custom", "import_path": f"{__name__}.reinforce", "kwargs": {"scale": 0.5}},
        by_token(lambda lp, q, a: -0.5 * math.exp(stop(lp) - q) * a * lp),
    ),
    "custom, with a teacher": (
        {"type": "custom", "import_path": f"{__name__}.distil"},
        by_token(lambda lp, q, a: -((q - 0.3) - stop(lp)) * lp),
    ),
    "with a reference": (
        {"type": "cispo", "beta": 0.2},
        by_token(
            lambda lp, q, a: (
                -min(max(math.exp(stop(lp) - q), 0.0), 6.0) * a * lp + 0.2 * (torch.exp((q - 0.3) - lp) - ((q - 0.3) - lp) - 1)
            )
        ),
    ),
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Let custom losses be found under the name that pytest gave this module."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))


@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_equal_the_formula(name):
    values, formula = FORMULAS[name]
    generator = torch.Generator().manual_seed(3)
    lengths, advantages = [1, 4, 2, 6, 3], [1.0, -0.7, 0.3, -1.5, 0.0]
    sampler = [(-2.0 * torch.rand(n, generator=generator, dtype=torch.float64) - 0.05).tolist() for n in lengths]
    moved = [[q + 0.8 * torch.randn((), generator=generator).item() for q in sample] for sample in sampler]
    trainer = torch.tensor([min(lp, -1e-3) for sample in moved for lp in sample], dtype=torch.float64, requires_grad=True)
    others = [[q - 0.3 for q in sample] for sample in sampler]
    proximal = [[q + PROXIMAL for q in sample] for sample in sampler]
    row = make_row(sampler, advantages, reference=others, teacher=others, proximal=proximal)
    scores = TokenScores(trainer, torch.zeros_like(trainer))
    found = total(make_policy_loss(parse(values))(scores, row), num_tokens=40, num_samples=11)
    expected = sum(
        formula(list(mine), sample, advantage, 40, 11)
        for mine, sample, advantage in zip(trainer.split(lengths), sampler, advantages, strict=True)
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-11)
    gradients = [torch.autograd.grad(loss, trainer, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-14)
    assert gradients[0].abs().sum() > 0


# --- expectations ----------------------------------------------------------------------------------------------------------

VOCABULARY, HORIZON = 3, 2
SEQUENCES = list(product(range(VOCABULARY), repeat=HORIZON))
NUM_STATES = 1 + VOCABULARY
REWARDS = dict(zip(SEQUENCES, torch.randn(len(SEQUENCES), generator=torch.Generator().manual_seed(1)).tolist(), strict=True))


def random_policy(seed: int) -> torch.Tensor:
    return torch.randn(NUM_STATES, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_logprobs(logits: torch.Tensor, sequence: tuple[int, int]) -> torch.Tensor:
    """Give the second token the first token as its state."""
    table = torch.log_softmax(logits, dim=-1)
    return torch.stack([table[0, sequence[0]], table[1 + sequence[0], sequence[1]]])


def exact_gradient(theta: torch.Tensor) -> torch.Tensor:
    """Return the gradient of minus the expected reward per token."""
    expected = sum(token_logprobs(theta, y).sum().exp() * REWARDS[y] for y in SEQUENCES)
    return torch.autograd.grad(-expected / HORIZON, theta)[0]


def mean_gradient(values: dict, theta: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
    """Return the estimator's mean over every completion, with a baseline of 0.3 subtracted."""
    loss = make_policy_loss(parse(values))
    mean = torch.zeros_like(theta)
    for sequence in SEQUENCES:
        sampled = token_logprobs(sampler, sequence).detach()
        logprobs = token_logprobs(theta, sequence)
        row = make_row([sampled.tolist()], [REWARDS[sequence] - 0.3])
        estimate = total(loss(TokenScores(logprobs, torch.zeros_like(logprobs)), row), num_tokens=HORIZON, num_samples=1)
        mean += sampled.sum().exp() * torch.autograd.grad(estimate, theta)[0]
    return mean


ON_POLICY = {
    "default": {"type": "default"},
    "default, sequence": {"type": "default", "ratio_type": "sequence"},
    "cispo": {"type": "cispo"},
    "aipo": {"type": "aipo"},
    "grpo": {"type": "grpo"},
    "grpo, sample": {"type": "grpo", "normalization": "sample"},
    "grpo, constant": {"type": "grpo", "normalization": "constant", "normalization_length": HORIZON},
    "gspo": {"type": "gspo"},
    "dppo": {"type": "dppo"},
    "ipo": {"type": "ipo"},
    "luspo": {"type": "luspo"},
    "gmpo": {"type": "gmpo"},
    "sapo": {"type": "sapo"},
    "vespo": {"type": "vespo"},
    "kl_cov": {"type": "kl_cov"},
    **{preset: {"type": "importance", "preset": preset} for preset in PRESETS},
    **{f"decoupled, {preset}": {"type": "decoupled", "preset": preset} for preset in PRESETS},
}
LENGTHS = {"luspo": HORIZON}
"""What the gradient of a loss is multiplied by, where it is not per token."""


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_every_loss_has_the_gradient_of_the_expected_reward(name):
    theta = random_policy(0).requires_grad_()
    found = mean_gradient(ON_POLICY[name], theta, theta.detach())
    torch.testing.assert_close(found, LENGTHS.get(name, 1) * exact_gradient(theta), rtol=1e-10, atol=1e-12)


WIDE = {"token_mask_low": 0.0, "token_mask_high": 1e9, "geo_mask_low": 0.0, "geo_mask_high": 1e9}
OPEN = {"sequence_clip_high": 1e9, "sequence_mask_high": 1e9} | WIDE


UNCLIPPED = {
    "default, sequence": {"type": "default", "ratio_type": "sequence"} | OPEN,
    "sequence_tis": {"type": "importance", "preset": "sequence_tis", "high": 1e9},
    "decoupled, sequence_tis": {"type": "decoupled", "preset": "sequence_tis", "high": 1e9},
}


@pytest.mark.parametrize("name", UNCLIPPED)
def test_off_policy_the_sequence_ratio_is_exact_as_long_as_nothing_is_clipped(name):
    theta, sampler = random_policy(0).requires_grad_(), random_policy(0) + 0.5 * random_policy(7)
    found = mean_gradient(UNCLIPPED[name], theta, sampler)
    torch.testing.assert_close(found, exact_gradient(theta), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in ON_POLICY if name not in UNCLIPPED])
def test_off_policy_the_others_are_biased_as_their_docstrings_say(name):
    theta, sampler = random_policy(0).requires_grad_(), random_policy(0) + 0.5 * random_policy(7)
    distance = (mean_gradient(ON_POLICY[name], theta, sampler) - exact_gradient(theta)).norm()
    assert distance > 0.01 * exact_gradient(theta).norm()


def test_the_pull_towards_a_reference_has_the_gradient_of_its_forward_divergence():
    theta, reference = random_policy(0).requires_grad_(), random_policy(5)
    loss = make_policy_loss(parse({"type": "grpo", "beta": 1.0}))
    mean = torch.zeros_like(theta)
    for sequence in SEQUENCES:
        logprobs = token_logprobs(theta, sequence)
        sampled = logprobs.detach()
        row = make_row([sampled.tolist()], [0.0], reference=[token_logprobs(reference, sequence).tolist()])
        estimate = total(loss(TokenScores(logprobs, torch.zeros_like(logprobs)), row), num_tokens=HORIZON, num_samples=1)
        mean += sampled.sum().exp() * torch.autograd.grad(estimate, theta)[0]
    reached = torch.cat([torch.ones(1, dtype=torch.float64), theta.detach()[0].softmax(0)])
    divergence = (reference.softmax(-1) * (reference.log_softmax(-1) - theta.log_softmax(-1))).sum(-1)
    expected = torch.autograd.grad((reached * divergence).sum() / HORIZON, theta)[0]
    torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-12)


def test_a_teacher_alone_has_the_gradient_of_the_divergence_from_it_at_each_token():
    theta, teacher = random_policy(0).requires_grad_(), random_policy(5)
    loss = make_policy_loss(parse({"type": "default", "adv_tau": 0.0, "teacher_tau": 1.0}))
    mean, kl = torch.zeros_like(theta), 0.0
    for sequence in SEQUENCES:
        logprobs = token_logprobs(theta, sequence)
        sampled = logprobs.detach()
        row = make_row([sampled.tolist()], [REWARDS[sequence]], teacher=[token_logprobs(teacher, sequence).tolist()])
        row_loss = loss(TokenScores(logprobs, torch.zeros_like(logprobs)), row)
        estimate = total(row_loss, num_tokens=HORIZON, num_samples=1)
        mean += sampled.sum().exp() * torch.autograd.grad(estimate, theta)[0]
        kl += sampled.sum().exp() * row_loss.values["teacher_kl"].mean()
    reached = torch.cat([torch.ones(1, dtype=torch.float64), theta.detach()[0].softmax(0)])
    divergence = (theta.softmax(-1) * (theta.log_softmax(-1) - teacher.log_softmax(-1))).sum(-1)
    expected = torch.autograd.grad((reached * divergence).sum() / HORIZON, theta)[0]
    torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kl, (reached * divergence).sum().detach() / HORIZON, rtol=1e-10, atol=1e-12)


def test_a_teacher_that_says_what_the_policy_says_changes_nothing():
    logprobs = torch.tensor([-0.5, -1.5], dtype=torch.float64, requires_grad=True)
    scores = TokenScores(logprobs, torch.zeros_like(logprobs))
    row = make_row([[-0.6, -1.4]], [0.4], teacher=[logprobs.tolist()])
    losses = [make_policy_loss(parse({"teacher_tau": tau}))(scores, row).terms[LossUnit.TOKEN].item() for tau in (0.0, 3.0)]
    assert losses[0] == losses[1] != 0.0


# --- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kwargs", "said"),
    [
        ("no_such_module.loss", {}, "cannot be imported"),
        ("math.pi", {}, "is float, not a function"),
        (f"{__name__}.reinforce", {}, "scale"),
        (f"{__name__}.reinforce", {"scale": 1.0, "other": 2}, "other"),
    ],
)
def test_a_custom_loss_that_cannot_be_called_is_refused_before_training(path, kwargs, said):
    with pytest.raises(ConfigError, match=said):
        make_policy_loss(parse({"type": "custom", "import_path": path, "kwargs": kwargs}))


def test_a_custom_loss_that_returns_no_tensor_says_what_it_must_return():
    loss = make_policy_loss(parse({"type": "custom", "import_path": f"{__name__}.no_tensor"}))
    logprobs = torch.zeros(1, requires_grad=True)
    with pytest.raises(ConfigError, match="returned float; it must return"):
        loss(TokenScores(logprobs, logprobs.detach()), make_row([[0.0]], [1.0]))
