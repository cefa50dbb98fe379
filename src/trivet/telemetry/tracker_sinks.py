"""Writes metrics to TensorBoard, trackio and MLflow. Imported only when one of them is configured.

Their packages are extras, and imported when a sink opens: a run needs only those that it uses.
"""

import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivet.config.schema.shared import MlflowConfig, TensorBoardConfig, TrackioConfig
from trivet.telemetry.sinks import Sink

_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
"""Characters that MLflow refuses in the name of a metric: the `@` of `avg@2` becomes a `_`."""
_RUN_TAG = "trivet.run"
"""The tag by which a resumed run finds its run of MLflow."""


class TensorBoardSink(Sink):
    """Writes one role's event files, with the classes of TensorBoard that torch uses for it. The orchestrator imports no torch."""

    def __init__(self, config: TensorBoardConfig, *, directory: Path, resume_step: int) -> None:
        """Open a file. TensorBoard hides what earlier files have of steps after `resume_step`, because they are done again."""
        files: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        suffix = f".{resume_step}"  # a resume within the second that is in the name writes a file of its own
        self._file = files.EventFileWriter(str(directory), flush_secs=config.flush_s, filename_suffix=suffix)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._file.add_event(self._events.Event(step=resume_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        """Write the metrics of a step."""
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._file.add_event(self._events.Event(wall_time=time, step=step, summary=self._summaries.Summary(value=scalars)))

    def close(self) -> None:
        """Write what is left to the file."""
        self._file.close()


class TrackioSink(Sink):
    """Writes one role's run of trackio."""

    def __init__(self, config: TrackioConfig, *, role: str, run_id: str) -> None:
        """Start the run, or go on with the one of this name."""
        library: Any = importlib.import_module("trackio")
        self._run = library.init(
            project=config.project,
            name=f"{config.name or run_id}-{role}",
            group=config.name or run_id,
            space_id=config.space_id,
            server_url=config.server_url,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        """Write the metrics of a step. trackio takes the time itself."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Deliver what is left."""
        self._run.finish()


class MlflowSink(Sink):
    """Writes one role's run of MLflow."""

    def __init__(self, config: MlflowConfig, *, role: str, run_id: str, output_dir: Path) -> None:
        """Start the run, or go on with the one that an earlier attempt started."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run reports to nobody unasked
        os.environ.setdefault(
            "MLFLOW_ALLOW_FILE_STORE", "true"
        )  # since 3.13 MLflow asks this of who writes files without a server
        library: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = library.MlflowClient(tracking_uri=config.tracking_uri or (output_dir.absolute() / "mlruns").as_uri())
        tag = f"{run_id}/{role}"
        experiment = self._find_experiment(config.experiment)
        found = self._client.search_runs([experiment], filter_string=f"tags.`{_RUN_TAG}` = '{tag}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            name = f"{config.name or run_id}-{role}"
            self._run_id = self._client.create_run(experiment, run_name=name, tags={_RUN_TAG: tag}).info.run_id

    def write(self, step: int, values: Mapping[str, float], *, time: float) -> None:
        """Write the metrics of a step."""
        stamp = int(time * 1000)
        metrics = [self._entities.Metric(_NOT_IN_NAMES.sub("_", name), value, stamp, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the run. A resumed run opens it again."""
        self._client.set_terminated(self._run_id)

    def _find_experiment(self, name: str) -> str:
        """Return the id of the experiment, which is made if it does not exist. Another role may make it at the same time."""
        found = self._client.get_experiment_by_name(name)
        try:
            return found.experiment_id if found is not None else self._client.create_experiment(name)
        except Exception:  # MLflow's exception for all errors: whether the other role was faster shows in what exists now
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found.experiment_id
