import logging

import pytest

from trivet.config.schema.shared import DetectorsConfig
from trivet.errors import Diverged
from trivet.telemetry.telemetry import DetectorWatch

EMPTY = {"batch/loss_tokens": 0.0}


def test_a_warning_names_the_step_the_remedy_and_the_key(caplog):
    with caplog.at_level(logging.WARNING):
        DetectorWatch(DetectorsConfig()).check(4, EMPTY)
    (record,) = caplog.records
    assert record.getMessage().startswith("step 4: no token to train on; every completion")
    assert record.getMessage().endswith("(detectors.no_loss_tokens)")


def test_stop_ends_the_run_with_exit_code_3():
    with pytest.raises(Diverged, match=r'step 4: .* \(detectors.no_loss_tokens = "stop"\)') as caught:
        DetectorWatch(DetectorsConfig(no_loss_tokens="stop")).check(4, EMPTY)
    assert caught.value.exit_code == 3


def test_off_says_nothing(caplog):
    DetectorWatch(DetectorsConfig(no_loss_tokens="off")).check(4, EMPTY)
    assert not caplog.records


def test_every_detector_has_a_key():
    watch = DetectorWatch(DetectorsConfig())
    reactions = [name for name, value in DetectorsConfig() if value == "warn"]
    assert sorted(watch._reactions) == sorted(reactions)
