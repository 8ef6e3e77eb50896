"""How many threads torch gets: set in one place, and without anything else being imported."""

from __future__ import annotations

import os

import torch


def set_threads(processes: int = 1) -> int:
    """Give torch its share of the cores: cores ÷ processes, at least 1; returns that number.

    The one place where it is set. More torch threads than cores over all processes collapse the speed tenfold, so every
    process of a run calls this first with the number of processes that compute at once.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // max(1, processes))
    torch.set_num_threads(threads)
    return threads
