"""What holds for all tests of policies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def distributions_check_themselves() -> Iterator[None]:
    """As torch has it; its compiler, and TorchRL, switch the checks off for the whole program."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    torch.distributions.Distribution.set_default_validate_args(before)
