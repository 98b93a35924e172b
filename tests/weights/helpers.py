"""Bare processes for these tests: each has a scheme, and does with it what it is told."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from rlcollect.layout import Leaf
from rlcollect.weights.shared import SharedMemWeightSyncScheme
from rlcollect.weights.values import MultiProcessWeightSyncScheme

SCHEMES = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]
LONG = 40  # seconds; waits that end by themselves


def net(value=0, width=3):
    """A model with parameters, buffers and integers, that has one number everywhere."""
    return filled(nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width)), value)


def heavy(value=0):
    """More than a pipe takes."""
    return filled(nn.Linear(1000, 1000), value)


def filled(model, value):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return model


def numbers_in(model):
    """All that stand in any of its tensors."""
    return {number for tensor in (*model.parameters(), *model.buffers()) for number in tensor.flatten().tolist()}


class Actor:
    """A process with a scheme, that does what it is told, one thing after the other.

    Args:
        scheme: goes to it as an argument.
        method: how it is started.
    """

    def __init__(self, scheme, method="fork"):
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["rlcollect"])  # seconds for each process
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_act, args=(there, scheme), daemon=True)
        self.process.start()
        there.close()

    def tell(self, name, *args, **options):
        """Says what to do; does not wait for it. A name is that of a method of `_Acting`, or of the scheme."""
        self.connection.send((name, args, options))

    def answer(self):
        """What came of it."""
        assert self.connection.poll(LONG), "it never answered"
        has_failed, value = self.connection.recv()
        if has_failed:
            raise value
        return value

    def ask(self, name, *args, **options):
        self.tell(name, *args, **options)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.join(LONG)

    def stop(self):
        with suppress(OSError):
            self.connection.send(None)
        self.connection.close()
        self.process.join(5)
        self.kill()
        self.process.close()


class _Acting:
    def __init__(self, scheme):
        self.scheme = scheme
        self.model = None

    def init(self, make, *args, model_id="policy", **options):
        """Initialises it for a model that is made here."""
        self.model = make(*args)
        self.scheme.init_on_receiver(model_id, model=self.model, **options)

    def numbers(self):
        return numbers_in(self.model)

    def places(self):
        """Where its tensors lie, and which objects they are."""
        return [(id(tensor), tensor.data_ptr()) for tensor in (*self.model.parameters(), *self.model.buffers())]

    def version(self):
        return self.scheme.version

    def descriptors(self):
        """How many are open."""
        return len(descriptors())

    def errors_of_copies(self):
        """What comes of copying its scheme, in each way."""
        errors = []
        for cross in (copy.copy, copy.deepcopy, pickle.dumps):
            try:
                cross(self.scheme)
            except TypeError as error:
                errors.append(str(error))
        return errors

    def receive_until(self, last):
        """Receives until it has this version; how often, and what was not whole: version k is k everywhere."""
        count, wrong, version = 0, [], 0
        while version != last:
            version = self.scheme.receive(LONG)
            count += 1
            if self.numbers() != {version}:
                wrong.append((version, self.numbers()))
        return count, wrong


def _act(connection, scheme):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # a copy of the program has none of its threads
    acting = _Acting(scheme)
    while (told := connection.recv()) is not None:
        name, args, options = told
        try:
            answer = False, getattr(acting if hasattr(acting, name) else scheme, name)(*args, **options)
        except Exception as error:
            answer = True, error
        connection.send(answer)


@contextmanager
def initialised(scheme, *models, method="fork", source=None):
    """The sender of a scheme here, and receivers in processes, for what these functions make; not connected."""
    scheme.init_on_sender("policy", model=source, num_workers=len(models))
    actors = []
    try:
        actors += [Actor(scheme, method) for _ in models]
        for place, (actor, make) in enumerate(zip(actors, models, strict=True)):
            actor.tell("init", make, worker_idx=place)
        for actor in actors:
            actor.answer()
        yield actors
    finally:
        scheme.shutdown()
        for actor in actors:
            actor.stop()


@contextmanager
def connected(scheme, *models, method="fork", source=None):
    """The same, connected."""
    with initialised(scheme, *models, method=method, source=source) as actors:
        for actor in actors:
            actor.tell("connect", LONG)
        scheme.connect(LONG)
        for actor in actors:
            actor.answer()
        yield actors


def descriptors():
    """Number and target of each that is open here."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            found.add((path.name, os.readlink(path)))  # noqa: PTH115 - the target is no path
    return found


class One(nn.Module):
    """Acts as its parameter."""

    def __init__(self, value=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, observation):
        return self.weight.expand(observation.shape)


LEAVES = [Leaf(("policy", "w"), (2,), torch.float32), Leaf(("critic", "w"), (3,), torch.float32)]


def all_of(value):
    return {leaf.key: torch.full(leaf.shape, float(value)) for leaf in LEAVES}


def part(value, leaf=LEAVES[0]):
    return {leaf.key: torch.full(leaf.shape, float(value))}


def taken(receiver):
    """The version, and the first number of each tensor; -1: it was not written to."""
    targets = {leaf.key: [torch.full(leaf.shape, -1.0)] for leaf in LEAVES}
    return receiver.take(targets), *(tensors[0][0].item() for tensors in targets.values())
