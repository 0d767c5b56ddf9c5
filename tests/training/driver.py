"""Trains in processes of their own, to be killed: python driver.py '{"overrides": …, "runs": {OUT: PLAN}}'.

A plan is a list of what befalls each process in turn that trains in the folder OUT:
    null            it trains to the end
    0.5             SIGKILL after so many seconds
    {"call": 7}     SIGKILL within its seventh call that changes the disk
    {"signal": 15}  that signal as soon as the first epoch is in metrics.jsonl
Processes are forks of this one, which has imported what takes long; their exit codes are printed. Where the
plan is null, this process trains itself, with an error in the second step of the rank "fail_on", if given.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # AdamW imports it
import torch.utils.tensorboard

from sfiformer.config import ExperimentConfig
from sfiformer.data import synthetic
from sfiformer.training import train
from sfiformer.training.step import Step


def die_within_call(number):
    calls = 0

    def fatal(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "symlink", "mkdir", "unlink"):
        setattr(os, name, fatal(getattr(os, name)))


def fail_on(rank):
    """An error of one rank alone, in its second step."""
    calls, step = 0, Step.__call__

    def fails(self, batches):
        nonlocal calls
        calls += 1
        if calls == 2 and os.environ.get("LOCAL_RANK", "0") == str(rank):
            raise ValueError(f"rank {rank} is out of luck")
        return step(self, batches)

    Step.__call__ = fails


def work(order, out):
    if "fail_on" in order:
        fail_on(order["fail_on"])
    torch.set_default_dtype(getattr(torch, order["dtype"]))
    synthetic.CLUSTER_SIZES["small"] = tuple(order["sizes"])
    synthetic.SMALLEST, synthetic.LARGEST = 2, 5
    config = ExperimentConfig.from_preset("cluster", order["overrides"])
    train(config, Path(out), resume=True)


def befall(pid, fate, out):
    if isinstance(fate, float):
        time.sleep(fate)
        os.kill(pid, signal.SIGKILL)
    elif fate and "signal" in fate:
        metrics = out / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(pid, fate["signal"])
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def follow(order, out, plan):
    codes = []
    for fate in plan:
        pid = os.fork()
        if pid == 0:
            if fate and not isinstance(fate, float) and "call" in fate:
                die_within_call(fate["call"])
            work(order, out)
            sys.exit(0)
        codes.append(befall(pid, fate, Path(out)))
    return codes


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    codes = {}
    for out, plan in order["runs"].items():
        codes[out] = work(order, out) if plan is None else follow(order, out, plan)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(json.dumps(codes))
