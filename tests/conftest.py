from __future__ import annotations

import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    """Each test starts from the same random state, and transformers keeps its advice to itself."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch._dynamo.reset()
