"""Processes that train together as torchrun starts them, kept for many cases.

One pool of processes runs all cases of a module.
"""

import multiprocessing
import os
import queue
from datetime import timedelta

import torch
from torch.distributed import TCPStore

# The processes are forked from one that has imported what they need.
CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 120  # seconds after which a case has hung; measurements of others may pause these processes
DIED = "died"


def _serve(tasks, answers):
    """Runs what it is sent, each time in the environment of one rank."""
    torch.set_num_threads(1)
    for number, environment, function, arguments in iter(tasks.get, None):
        os.environ |= environment
        try:
            answers.put((number, environment["RANK"], function(*arguments)))
        except BaseException as error:
            answers.put((number, environment["RANK"], error))


class Pool:
    """Processes for up to `size` ranks; those that a case has ended are replaced."""

    def __init__(self, size):
        CONTEXT.set_forkserver_preload(["rank_pool", "fastqt.train"])
        self._answers = CONTEXT.Queue()
        self._workers = [self._begin() for _ in range(size)]
        self._cases = 0

    def _begin(self):
        tasks = CONTEXT.Queue()
        process = CONTEXT.Process(target=_serve, args=(tasks, self._answers), daemon=True)
        process.start()
        return process, tasks

    def run(self, ranks, function, *arguments):
        """Calls a function of a module on so many ranks; returns each one's result, error, or DIED."""
        self._cases += 1
        self._workers = [each if each[0].is_alive() else self._begin() for each in self._workers]
        workers = self._workers[:ranks]
        # As the agent of torchrun does, this process keeps the store.
        store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        for rank, (_, tasks) in enumerate(workers):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            tasks.put((self._cases, own, function, arguments))
        return self._collect(workers)

    def _collect(self, workers):
        found, waited = {}, 0
        while len(found) < len(workers):
            try:
                number, rank, answer = self._answers.get(timeout=0.5)
            except queue.Empty:
                waited += 0.5
                for rank, (process, _) in enumerate(workers):
                    if not process.is_alive():
                        found.setdefault(rank, DIED)
                assert waited < PATIENCE, f"no answer but from {sorted(found)}"
                continue
            if number == self._cases:
                found[int(rank)] = answer
        return [found[rank] for rank in range(len(workers))]

    def close(self):
        """Ends the processes."""
        for process, tasks in self._workers:
            tasks.put(None)
            process.join(5)
            process.kill()
