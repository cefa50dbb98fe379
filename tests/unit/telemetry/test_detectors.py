import pytest

from trivet.config.schema.shared import DetectorsConfig
from trivet.key_names import use_names
from trivet.telemetry.detectors import make_detectors

CONFIG = DetectorsConfig(entropy_share=0.1, gradient_factor=10.0, stuck_policy_steps=3, patience=2)
HEALTHY = {
    "reward/min": 0.0,
    "reward/max": 1.0,
    "batch/effective_batch_size": 0.8,
    "batch/loss_tokens": 100.0,
    "error/mean": 0.0,
    "is_truncated/mean": 0.1,
    "entropy/mean": 1.0,
    "mismatch_kl/mean": 0.001,
    "optim/grad_norm": 0.3,
}


def findings(steps):
    """Return (step, detector) of every finding over `steps`."""
    detectors = make_detectors(CONFIG)
    said = []
    for step, metrics in enumerate(steps, start=1):
        said += [(step, detector.name) for detector in detectors if detector.check(metrics)]
    return said


def healthy(num, **changes):
    return [{**HEALTHY, "progress/ckpt_step": float(step), **changes} for step in range(num)]


def test_a_healthy_run_is_left_alone():
    assert findings(healthy(50)) == []


@pytest.mark.parametrize(
    ("detector", "changes"),
    [
        ("equal_rewards", {"reward/min": 1.0}),
        ("zero_advantages", {"batch/effective_batch_size": 0.0}),
        ("failed_rollouts", {"error/mean": 0.5}),
        ("truncated", {"is_truncated/mean": 0.9}),
        ("mismatch_drift", {"mismatch_kl/mean": 0.2}),
    ],
)
def test_a_lasting_condition_is_said_when_the_patience_is_over_and_again_later(detector, changes):
    assert findings(healthy(4, **changes)) == [(2, detector), (4, detector)]


@pytest.mark.parametrize("changes", [{"reward/min": 1.0}, {"mismatch_kl/mean": 0.2}])
def test_a_condition_that_passes_within_the_patience_is_not_said(changes):
    steps = [{**metrics, **(changes if step % 2 else {})} for step, metrics in enumerate(healthy(6))]
    assert findings(steps) == []


def test_a_batch_without_loss_tokens_is_said_at_once():
    assert findings(healthy(1, **{"batch/loss_tokens": 0.0})) == [(1, "no_loss_tokens")]


def test_entropy_is_compared_with_its_level_at_the_start():
    assert findings([*healthy(5), *healthy(2, **{"entropy/mean": 0.09})]) == [(7, "entropy_collapse")]
    assert findings([*healthy(5), *healthy(9, **{"entropy/mean": 0.11})]) == []


def test_a_gradient_spike_is_said_at_once_and_compared_with_recent_steps():
    spike = healthy(1, **{"optim/grad_norm": 3.1})
    assert findings([*healthy(5), *spike, *healthy(3)]) == [(6, "gradient_spike")]
    assert findings([*healthy(4), *spike]) == [], "too few steps to know what is normal"


def test_a_policy_that_does_not_advance_is_said_after_its_own_number_of_steps():
    stuck = healthy(1, **{"progress/ckpt_step": 4.0})
    assert findings(stuck * 4) == [(4, "stuck_policy")]
    assert findings(stuck * 3) == []


def test_metrics_of_the_other_role_say_nothing():
    assert findings([{}] * 20) == []


def test_a_remedy_names_each_key_of_the_user_once() -> None:
    with use_names({"seq_len": "args.length", "max_model_len": "args.length"}):
        remedies = {detector.name: detector.remedy for detector in make_detectors(CONFIG)}
    assert remedies["truncated"] == "raise orchestrator.sampling.max_tokens and args.length, or reward shorter answers"
