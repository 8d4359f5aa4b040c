"""One pool of rank processes for all tests: starting a process costs seconds of imports, running a job milliseconds."""

import pytest
import torch

from lindos.comm.ranks import Ranks, pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """The pool: `ranks.run(job, 4, argument)`, where job is a function of a module and takes the world first."""
    return pool()
