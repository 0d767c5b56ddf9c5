"""Where the processes of a suite's runs live: on this machine, or as jobs of a SLURM cluster."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sfiformer.config import TrainerConfig
from sfiformer.errors import UserError

MOST_AT_ONCE = 8  # of a CPU's runs where the user does not say how many
MOST_QUEUED = 1000  # of a cluster's jobs, likewise


class Job(Protocol):
    """A process under way."""

    def poll(self) -> int | None:
        """The exit code once it has ended; below 0 for a signal."""

    def stop(self) -> None:
        """Ask it to write a checkpoint and end."""

    def kill(self) -> None:
        """End it at once."""


class Engine(Protocol):
    """Starts processes, so many at a time."""

    jobs: int

    def start(self, arguments: Sequence[str], log: Path, slot: int, trainer: TrainerConfig) -> Job:
        """Start `sfi ARGUMENTS`, whose output goes to `log`; `slot` < jobs is no other process's meanwhile."""


class LocalEngine:
    """Processes on this machine, each with its share of the cores and, where there are several GPUs, one of them.

    jobs: processes at a time; None for one on each GPU, or on each core where there is none.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.gpus = visible_gpus()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.jobs = jobs or len(self.gpus) or min(cores, MOST_AT_ONCE)
        self.threads = max(1, cores // self.jobs)

    def start(self, arguments: Sequence[str], log: Path, slot: int, trainer: TrainerConfig) -> Job:
        named = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # the outermost of nested levels
        threads = min(self.threads, int(named)) if named.isdecimal() and int(named) else self.threads
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if len(self.gpus) > 1 and trainer.devices == 1:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        with open_log(log, arguments) as file:
            process = subprocess.Popen(
                command(arguments),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches the suite alone, which passes it on once: a second would end a run at once.
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        return LocalJob(process)


@dataclass
class LocalJob:
    """A child process."""

    process: subprocess.Popen

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()


@dataclass
class TrainCommand:
    """What a cluster's job calls. A preempted job is queued again and resumes from its last checkpoint."""

    arguments: list[str]
    log: str

    def __call__(self) -> int:
        with open_log(Path(self.log), self.arguments) as file:
            return subprocess.run(command(self.arguments), stdout=file, stderr=subprocess.STDOUT).returncode

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class SlurmEngine:
    """Each run a job of a SLURM cluster, through submitit.

    Args:
        folder: for submitit's own files; the cluster's machines must see it, as they must see the suite's.
        jobs: queued or running at a time.
        parameters: of submitit's executor: timeout_min, mem_gb, cpus_per_task, slurm_partition, …
        cluster: "slurm", or what submitit has for machines without it ("local").
    """

    def __init__(
        self, folder: Path, jobs: int | None, parameters: dict[str, Any], cluster: str = "slurm"
    ) -> None:
        try:
            import submitit
        except ImportError:
            raise UserError("--engine slurm needs submitit: pip install 'sfiformer[cluster]'") from None
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        except RuntimeError as error:
            raise UserError(f"--engine slurm: {error}; run this on a machine where sbatch works") from None
        self.parameters = {"timeout_min": 24 * 60, "cpus_per_task": 4, "name": "sfi-suite", **parameters}
        self.jobs = jobs or MOST_QUEUED

    def start(self, arguments: Sequence[str], log: Path, slot: int, trainer: TrainerConfig) -> Job:
        gpus = {} if trainer.accelerator == "cpu" else {"gpus_per_node": trainer.devices}
        tasks = {"nodes": trainer.nodes, "tasks_per_node": trainer.devices}
        try:
            self.executor.update_parameters(**{**tasks, **gpus, **self.parameters})
            job = self.executor.submit(TrainCommand(list(arguments), str(log.absolute())))
        except (NameError, TypeError, ValueError, RuntimeError) as error:  # each for another kind of mistake
            raise UserError(f"--slurm: submitit refused: {' '.join(str(error).split())}") from None
        return SlurmJob(job, log)


@dataclass
class SlurmJob:
    """A cluster's job."""

    job: Any
    log: Path
    stopped: bool = False

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        if self.job.exception() is not None:  # cancelled, out of time or memory: it left no exit code
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"sfi: the cluster's job {self.job.job_id} ended as {self.job.state}\n")
            return 128 + signal.SIGTERM if self.stopped else 1
        return max(self.job.results())

    def stop(self) -> None:
        self.stopped = True
        self.job.cancel(check=False)

    kill = stop


def command(arguments: Sequence[str]) -> list[str]:
    """`sfi ARGUMENTS` in this Python."""
    return [sys.executable, "-m", "sfiformer", *arguments]


def open_log(log: Path, arguments: Sequence[str]) -> Any:
    """The log of a run, open to append to, the command noted."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = log.open("a", encoding="utf-8")
    file.write(f"$ sfi {shlex.join(arguments)}\n")
    file.flush()
    return file


def visible_gpus() -> list[str]:
    """The GPUs that processes of this one may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [gpu for gpu in named.split(",") if gpu][:count] if named else [str(i) for i in range(count)]


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM should the suite be killed outright: the run stops with a checkpoint."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
