"""Set-up of all tests: without a GPU, Triton kernels run in the interpreter. This is set before Triton is imported."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise torch looks for the driver each time that it is asked for GPUs

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs inherit a handler that ignores SIGINT
torch.set_num_threads(1)  # several processes share the cores

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.helpers import interpreter  # here, because it imports Triton

    interpreter.prepare()

# A busy machine is slow, which is no failure.
settings.register_profile("ringflash", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ringflash")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests by timeout, longest first, so that no long test runs alone on one worker at the end.

    Tests of ranks that share one GPU get as many groups as there are turns on it. With `--dist loadgroup` the other
    workers then run other tests, where they would wait for a turn.
    """
    from tests.helpers import one_gpu  # here, because it imports the library

    if one_gpu.GPUS == 1:
        # Files of such tests, and no others, import `one_gpu` as a module.
        ranks = [item for item in items if isinstance(item, pytest.Function) and hasattr(item.module, "one_gpu")]
        for number, item in enumerate(ranks):
            item.add_marker(pytest.mark.xdist_group(f"ranks-{number % one_gpu.TURNS}"))

    def given(item: pytest.Item) -> float:
        timeout = item.get_closest_marker("timeout")
        return timeout.args[0] if timeout is not None else 0.0

    items.sort(key=given, reverse=True)


def pytest_collection_finish() -> None:
    """Exempts what importing and collecting made from garbage collection, which would visit it time and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _release_gpu_memory() -> Iterator[None]:
    """Returns cached memory of the GPU after each test, because many test processes share it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**28:
        torch.cuda.empty_cache()
