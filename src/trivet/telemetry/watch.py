"""Shows each step's metrics to the detectors and reacts as `[detectors]` says. Owned by a role's Telemetry."""

import logging
from collections.abc import Mapping

from trivet.algorithms.detectors import Thresholds, make_detectors
from trivet.config.sections.detectors import DetectorsConfig
from trivet.errors import Diverged

logger = logging.getLogger(__name__)


class Watch:
    """Asks each detector that is not off about every step.

    >>> watch = Watch(config)
    >>> watch.look(7, {"optim/grad_norm": 0.3})
    """

    def __init__(self, config: DetectorsConfig) -> None:
        thresholds = Thresholds(
            failed_share=config.failed_share,
            truncated_share=config.truncated_share,
            entropy_share=config.entropy_share,
            mismatch_kl=config.mismatch_kl,
            gradient_factor=config.gradient_factor,
            stuck_policy_steps=config.stuck_policy_steps,
        )
        detectors = make_detectors(thresholds, patience=config.patience)
        self._reactions: dict[str, str] = {detector.name: getattr(config, detector.name) for detector in detectors}
        self._detectors = [detector for detector in detectors if self._reactions[detector.name] != "off"]

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's metrics to the detectors.

        Raises:
            Diverged: a detector that is set to `stop` spoke.
        """
        for detector in self._detectors:
            finding = detector.look(metrics)
            if finding is None:
                continue
            if self._reactions[finding.detector] == "stop":
                raise Diverged(f'step {step}: {finding.message} (detectors.{finding.detector} = "stop")')
            logger.warning("step %s: %s (detectors.%s)", step, finding.message, finding.detector)
