"""Processes that train together as torchrun starts them. A pool of them runs many cases."""

import multiprocessing
import os
import socket
import time
from datetime import timedelta
from multiprocessing.connection import wait

import torch
from torch.distributed import TCPStore

# The processes are forked from one that has imported what they need.
CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 120  # seconds after which a case has hung; other work may pause these processes
GRACE = 10  # seconds that a process may live on after all others have ended
DIED = "died"


def _serve(tasks):
    torch.set_num_threads(1)
    while True:
        try:
            environment, function, arguments = tasks.recv()
        except EOFError:
            return
        os.environ |= environment
        try:
            tasks.send(function(*arguments))
        except BaseException as error:
            tasks.send(error)


class Pool:
    """Processes for up to `size` ranks; those that a case has ended are replaced."""

    def __init__(self, size):
        names = [
            "fastqt.sentences.train",
            "fastqt.sentences.evaluation",
            "torch._dynamo",
        ]  # the server does not have the tests' path
        CONTEXT.set_forkserver_preload(names)
        self._workers = [self._begin() for _ in range(size)]

    def _begin(self):
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(self, ranks, function, *arguments):
        """Calls a function of an importable module on so many ranks.

        Returns:
            Each rank's result or error; DIED if its process has ended, or had to be ended after the others.
        """
        self._workers = [each if each[0].is_alive() else self._begin() for each in self._workers]
        # As the agent of torchrun does, this process keeps the store.
        store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        # Gloo would look up the name of this machine, which may take seconds.
        environment["GLOO_SOCKET_IFNAME"] = next(
            name for _, name in socket.if_nameindex() if name[:2] == "lo"
        )
        for rank, (_, tasks) in enumerate(self._workers[:ranks]):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            tasks.send((own, function, arguments))
        return self._collect(ranks)

    def _collect(self, ranks):
        found, end = {}, time.monotonic() + PATIENCE
        while len(found) < ranks:
            open_ranks = {self._workers[rank][1]: rank for rank in range(ranks) if rank not in found}
            for tasks in wait(list(open_ranks), timeout=GRACE):
                try:
                    found[open_ranks[tasks]] = tasks.recv()
                except EOFError:
                    self._workers[open_ranks[tasks]][0].join()
                    found[open_ranks[tasks]] = DIED
                break
            else:
                if len(found) == ranks - 1:
                    (last,) = open_ranks.values()
                    self._workers[last][0].kill()
            assert time.monotonic() < end, f"no answer but from {sorted(found)}"
        return [found[rank] for rank in range(ranks)]

    def close(self):
        for process, tasks in self._workers:
            tasks.close()
            process.join(5)
            process.kill()
