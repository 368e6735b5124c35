import pytest
import torch
from jaxtyping import config as jaxtyping_config


@pytest.fixture
def plain_types():
    """Switch the shape enforcement off, so that a test sees rc_lib's own error message."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)
