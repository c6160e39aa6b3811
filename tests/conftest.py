"""What every test gets: a fresh Dynamo, one thread, and Hypothesis profiles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
# Compiling takes as long as it takes: no deadline.  Examples are derandomised, so that
# a change is tested on what its parent was tested on; `nightly` draws new ones.
settings.register_profile(
    "normal", deadline=None, derandomize=True, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.load_profile("normal")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Compiled code and counters of one test are not seen by the next."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """The tensors are tiny: threads cost more than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """What lives on when a file begins is not looked through again.

    Compilers leave millions of objects in their caches, and many tests here collect
    garbage, in loops.
    """
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()
