from __future__ import annotations

import gc
import socket

import pytest

gc.disable()  # while modules are imported


def pytest_collection_finish():
    """Modules and collected tests live as long as the process: no later collection visits them."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    """Each test starts from the same random state, and transformers keeps its advice to itself."""
    import torch  # here, for the process that only starts the workers of a run needs neither
    import transformers

    if transformers.logging.get_verbosity() != transformers.logging.ERROR:
        transformers.logging.set_verbosity_error()  # clears the caches of all loggers
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def without_figures(monkeypatch):
    """Drawing takes longest in the small runs of tests that look at no figure."""
    from farspan.report import style

    monkeypatch.setattr(style, "save", lambda figure, stem: None)


@pytest.fixture
def only_loopback(monkeypatch):
    """For tests with servers: no request leaves this machine."""
    connect = socket.socket.connect

    def checked(self, address):
        assert address[0] in ("127.0.0.1", "::1", "localhost"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", checked)
