"""Attribution: the walk backwards against the terms listed forwards, for every kind of network."""

import pytest
import torch

from rc_lib import paths
from rc_lib.attribution import attribute
from rc_lib.frozen import Frozen, Gate
from rc_lib.san import SAN
from tests.test_frozen import TIGHT, VARIANTS, network, tokens  # noqa: F401 (a fixture)


def test_terms_are_those_of_the_listed_paths(network):  # noqa: F811
    X, G = tokens(2, 5, 6), tokens(2, 5, 6, seed=3)
    frozen = paths.freeze(network, X)
    found, listed = attribute(frozen, G), frozen.sum_over_paths()
    parts = listed.terms.unsqueeze(-4) if listed.sources is None else listed.sources
    expected = (parts * G[:, None, None]).sum((-2, -1))
    size = expected.abs().max() + 1
    assert (found.terms - expected).abs().max() < TIGHT * size
    assert (found.bias.sum(-1) - (frozen.bias() * G).sum((-2, -1))).abs().max() < TIGHT * size
    assert (found.total - (network(X).detach() * G).sum((-2, -1))).abs().max() < TIGHT * size


def test_by_hand():
    """One head that averages two tokens and doubles them, with a skip: T = X + 2 P X."""
    san, X = SAN(1, 1, 2, skip=True), torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    a = san.layers[0].attention
    with torch.no_grad():
        for p in san.parameters():
            p.zero_()
        a.W_V[0], a.W_O[0], a.b_O[:] = torch.eye(2), 2 * torch.eye(2), torch.tensor([7.0, 0.0])
    G = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)  # read the first token's first feature
    found = attribute(paths.freeze(san, X), G)
    assert found.terms.tolist() == [[1.0, 4.0]]
    assert found.bias.tolist() == [7.0, 0.0]


def test_bad_input(plain_types):
    san, X = SAN(1, 1, 6, skip=True), tokens(5, 6)
    frozen = paths.freeze(san, X)
    with pytest.raises(ValueError, match=r"output's shape \(5, 6\), but has \(6, 6\)"):
        attribute(frozen, tokens(6, 6))
    with pytest.raises(ValueError, match="G"):
        attribute(frozen, tokens(5, 6) / 0)
    zeros = torch.zeros(3, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    gate = Gate(tokens(5, 3), tokens(6, 3), zeros[0], tokens(3, 6), zeros[1])
    with pytest.raises(ValueError, match="no sources"):
        attribute(Frozen(X, [*frozen.steps, gate]), X)


def test_other_networks_and_types_are_named(plain_types):
    X = tokens(5, 6)
    with pytest.raises(TypeError, match="frozen must be a Frozen, as freeze gives it, but is None"):
        attribute(None, X)
    frozen = paths.freeze(SAN(1, 1, 6), X)
    with pytest.raises(TypeError, match=r"G is .*float32.*, but the network is .*float64"):
        attribute(frozen, X.float())
