"""The generators come back as they were, whichever NumPy has."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from truestep import rng


@pytest.fixture(params=[np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
def generator(request: pytest.FixtureRequest) -> Iterator[None]:
    """NumPy's global generator, in the middle of its numbers."""
    own: Any = np.random.get_bit_generator()
    np.random.set_bit_generator(request.param(3))
    np.random.standard_normal(3)
    yield
    np.random.set_bit_generator(own)


def test_numpys_generator_comes_back_here_and_in_another_process(generator: None) -> None:
    state = rng.capture()
    drawn = np.random.standard_normal(5)
    stream = io.BytesIO()
    torch.save(state.to_document(), stream)
    stream.seek(0)
    read = rng.RngState.from_document(torch.load(stream, weights_only=True))
    assert read.fingerprint() == state.fingerprint()
    for known in (state, read):
        rng.restore(known)
        assert np.array_equal(np.random.standard_normal(5), drawn)
    assert rng.capture().fingerprint() != state.fingerprint()
