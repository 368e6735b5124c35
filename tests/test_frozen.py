"""Frozen networks of every kind: norms, masks, MLPs as sources; and the spectrum's views of its terms."""

import pytest
import torch

from rc_lib import masks, paths
from rc_lib.san import SAN

F64 = torch.float64

# A sum of some hundreds of products in float64, each good to about 1e-15 of the largest term.
TIGHT = 1e-12


def tokens(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def relative(A, B):
    return float((A - B).abs().max() / B.abs().max())


VARIANTS = {
    "none": {"skip": True},
    "post": {"skip": True, "norm": "post"},
    "pre": {"skip": True, "norm": "pre", "final_norm": True},
    "post, no skip": {"norm": "post"},
    "transformer, post": {"skip": True, "mlp": True, "norm": "post"},
    "transformer, pre": {"skip": True, "mlp": True, "norm": "pre", "final_norm": True},
    "surgery": {"mlp": True, "mlp_skip": True, "norm": "post"},
    "SAN+MLP": {"mlp": True},
    "skip, then MLP without": {"skip": True, "mlp": True, "mlp_skip": False},
}


@pytest.fixture(params=VARIANTS, ids=str)
def network(request):
    san = SAN(3, 2, 6, value_dim=5, bias_std=1.0, **VARIANTS[request.param])
    with torch.no_grad():  # gains and shifts that a trained network would have
        for name, p in san.named_parameters():
            if "norm" in name:
                p.add_(tokens(6, seed=1).mul(0.3))
    return san


MASKS = {
    "no mask": {},
    "causal": {"mask": masks.causal(5)},
    "padding": {"key_padding_mask": torch.tensor([[True] * 5, [True, True, False, True, False]])},
    "a blind token": {"mask": torch.tensor([[True] * 5, [False] * 5, [True] * 5, [True] * 5, [True] * 5])},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_kind_of_network_is_reconstructed(network, mask):
    X = tokens(2, 5, 6)
    out, frozen = network(X, **mask).detach(), paths.freeze(network, X, **mask)
    recursion, listed = frozen.sum_by_length(by_source=True), frozen.sum_over_paths()
    assert relative(recursion.total, out) < TIGHT
    assert relative(listed.total, out) < TIGHT
    assert (recursion.terms - listed.terms).abs().max() < TIGHT * listed.terms.abs().max()
    assert (frozen.sum_by_length().terms - listed.terms).abs().max() < TIGHT * listed.terms.abs().max()
    if listed.sources is not None:
        assert recursion.sources.shape == (2, 4, 4, 5, 6)
        assert (recursion.sources - listed.sources).abs().max() < TIGHT * listed.sources.abs().max()


def test_listed_paths_are_as_many_as_counted(network):
    frozen = paths.freeze(network, tokens(5, 6))
    listed = [sum(h > 0 for h in p) for s in range(len(frozen.sources)) for p in frozen.paths(s)]
    assert [listed.count(k) for k in range(4)] == frozen.count_by_length()


def test_an_mlp_starts_paths_of_its_own():
    san, X = SAN(2, 3, 6, skip=True, mlp=True), tokens(5, 6)
    assert paths.freeze(san, X).count_by_length() == [1 + 1 + 1, 6 + 3, 9]
    a, trace = san.layers[1].attention, san.trace(X)
    by_hand = (trace.attention[1][1] @ trace.mlp_out[0] @ a.W_h[1]).detach()
    assert relative(paths.path_output(san, X, (2,), source=1), by_hand) < TIGHT
    assert torch.equal(paths.path_output(san, X, (), source=2), trace.mlp_out[1])


def test_an_mlp_without_a_skip_ends_all_paths():
    san, X = SAN(2, 3, 6, mlp=True), tokens(5, 6)
    spectrum = paths.sum_by_length(san, X, by_source=True)
    assert torch.equal(spectrum.terms[0], san.trace(X).output)
    assert spectrum.sources[:2].abs().max() == 0
    assert paths.path_output(san, X, (1, 1)).abs().max() == 0


def test_spectrum_helpers():
    s = paths.sum_by_length(SAN(3, 2, 6, skip=True, bias_std=1.0), tokens(5, 6))
    out = s.total
    assert torch.equal(s.alone(), s.terms + s.bias)
    assert torch.equal(s.alone(bias=False), s.terms)
    assert relative(s.cumulative()[-1], out) < TIGHT
    assert torch.allclose(s.cumulative(bias=False)[1], s.terms[0] + s.terms[1], rtol=0, atol=1e-13)
    for k in range(4):
        assert torch.allclose(s.leave_one_out()[k] + s.terms[k], out, rtol=0, atol=1e-12)


def test_an_overflowing_network_is_refused(plain_types):
    with pytest.raises(ValueError, match="the network's output must be finite"):
        paths.sum_by_length(SAN(30, 3, 6, skip=True, gain=1e9), tokens(5, 6))


def test_layers_that_do_not_fit_the_trace(plain_types):
    san, X = SAN(2, 3, 6), tokens(5, 6)
    with pytest.raises(ValueError, match="layers has 1 entries; expected 2"):
        paths.freeze_trace(san.trace(X), list(san.layers)[:1])


def test_views_take_true_or_false(plain_types):
    spectrum = paths.sum_by_length(SAN(2, 1, 3), tokens(5, 3))
    for view in (spectrum.alone, spectrum.cumulative):
        with pytest.raises(TypeError, match="bias must be True or False, but is str 'no'"):
            view(bias="no")
