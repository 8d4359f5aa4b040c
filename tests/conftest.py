"""One pool of rank processes for all tests: starting a process costs seconds of imports, running a job milliseconds."""

import pytest
import torch

from lindos.comm.ranks import Ranks, pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """The pool: `ranks.run(job, 4, argument)`, where job is a function of a module and takes the world first."""
    return pool()


@pytest.fixture(scope="session", autouse=True)
def memory_of_proofs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Proofs made by tests are remembered in a folder of theirs, not in the user's."""
    from lindos.hf import proven

    proven.CACHE = tmp_path_factory.mktemp("proofs") / "proven.json"
