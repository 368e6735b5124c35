"""Path effectiveness: the exact spectrum against all paths listed, the protocol against a plain loop."""

import copy
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from rc_lib import path_effectiveness as pe
from rc_lib.frozen import freeze
from rc_lib.paths import all_paths, count_by_length, sum_by_length
from rc_lib.rank import relative_residual
from rc_lib.san import SAN
from rc_lib.tasks import Examples
from rc_lib.token_classifier import TokenClassifier

F64 = torch.float64

# Sums of some thousands of products in float64.
TIGHT = 1e-12


def network(L=3, H=2, d=6, *, classes=5, symbols=7, positions=11, affine=True, seed=4, **switches):
    """A network whose biases, gains and shifts are off their neutral values, but do not drown its answers."""
    switches = {"skip": True, "norm": "post", "bias_std": 0.1, "gain": 1.5, "dtype": F64} | switches
    san = SAN(L, H, d, head_dim=3, seed=seed, **switches)
    model = TokenClassifier(san, classes, symbols=symbols, positions=positions, affine=affine, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for table in (model.E, model.p):  # tokens large enough to differ in their answers
            table.copy_(torch.randn(table.shape, dtype=F64, generator=generator))
        model.b_out += 0.2 * torch.randn(classes, dtype=F64, generator=generator).to(model.b_out.dtype)
        for name, p in san.named_parameters():
            if affine and "norm" in name:
                p += 0.1 * torch.randn(p.shape, dtype=F64, generator=generator).to(p.dtype)
    return model


def data(N=13, n=11, *, classes=5, symbols=7, padded=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randint(symbols, (N, n), generator=g)
    labels = torch.randint(classes, (N, n), generator=g)
    real = torch.ones(N, n, dtype=torch.bool)
    if padded:  # lengths 1..n-2, so that the last columns go, and a hole in the middle of one set
        real = torch.arange(n) < 1 + torch.arange(N)[:, None] % (n - 2)
        real[5, 2] = False
    return Examples(inputs, labels, real)


def answers(model, states, examples):
    """Share of right answers, token by token."""
    logits = states @ model.W_out + model.b_out
    right = total = 0
    for i in range(len(examples)):
        for j in range(examples.inputs.shape[1]):
            if examples.real[i, j]:
                right += int(logits[i, j].argmax() == examples.labels[i, j])
                total += 1
    return right / total


SWITCHES = [
    {},
    {"norm": "pre", "final_norm": True},
    {"norm": "pre"},
    {"norm": "none"},
    {"mlp": True, "mlp_dim": 5},
    {"mlp": True, "mlp_dim": 5, "norm": "pre"},
    {"skip": False},
    {"skip": False, "norm": "none", "mlp": True, "mlp_dim": 5},
    {"L": 2, "H": 3},
]


# ------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@pytest.mark.parametrize("padded", [True, False])
@torch.no_grad()
def test_exact_is_the_enumeration_of_all_paths(switches, padded):
    model, examples = network(**switches), data(padded=padded)
    L = model.san.depth
    found = pe.exact(model, examples, chunk=4)
    frozen = freeze(model.san, model.embed(examples.inputs), key_padding_mask=examples.real)
    terms = [torch.zeros_like(frozen.X) for _ in range(L + 1)]
    for source in range(len(frozen.sources)):
        for path in frozen.paths(source):
            terms[sum(h > 0 for h in path)] += frozen.path(path, source)
    bias, total = frozen.bias(), sum(terms) + frozen.bias()
    assert found.counts == frozen.count_by_length()
    assert found.full == answers(model, total, examples) == pe.accuracy(model, examples)
    assert found.bias == answers(model, bias, examples)
    for k in range(L + 1):
        assert found.alone[k] == answers(model, terms[k] + bias, examples)
        assert found.cumulative[k] == answers(model, sum(terms[: k + 1]) + bias, examples)
        assert found.leave_one_out[k] == answers(model, total - terms[k], examples)
        rows = [T[keep] for T, keep in zip(terms[k], examples.real, strict=True) if bool(keep.any())]
        norm = math.sqrt(sum(float(r.square().sum()) for r in rows) / sum(len(r) for r in rows))
        assert math.isclose(found.norms[k], norm, rel_tol=TIGHT)
        residual = sum(float(relative_residual(r)) for r in rows) / len(rows)
        assert math.isclose(found.residuals[k], residual, rel_tol=TIGHT, abs_tol=TIGHT)
    rows = bias[examples.real]
    assert math.isclose(found.bias_norm, rows.norm() / math.sqrt(len(rows)), rel_tol=TIGHT)
    assert found.reconstruction <= TIGHT


@pytest.mark.parametrize("chunk", [3, 100, None])
def test_exact_does_not_depend_on_the_chunks(chunk):
    model, examples = network(), data()
    whole, parts = pe.exact(model, examples, chunk=13), pe.exact(model, examples, chunk=chunk)
    for name in ("alone", "cumulative", "leave_one_out"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    for name in ("norms", "residuals"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name), rtol=TIGHT, atol=0)


def test_a_float32_model_is_measured_in_float64_and_left_as_it_is():
    model, examples = network(dtype=torch.float32), data()
    model.train()
    before = copy.deepcopy(model.state_dict())
    found = pe.exact(model, examples)
    assert found.reconstruction < 1e-13  # float32 arithmetic would leave 1e-7
    assert found.alone.dtype == F64
    assert torch.equal(found.alone, pe.exact(copy.deepcopy(model).double(), examples).alone)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_read_out_that_is_not_finite_is_refused(value, plain_types):
    model = network()
    with torch.no_grad():
        model.W_out[0, 0] = value
    with pytest.raises(ValueError, match="logits"):
        pe.exact(model, data())


@pytest.mark.parametrize("switches", [s for s in SWITCHES if s.get("skip", True)], ids=str)
@torch.no_grad()
def test_the_test_networks_give_many_answers(switches):
    # Were all answers one class, most of what is wrong in a path would leave every accuracy as it is.
    model, examples = network(**switches), data()
    terms = sum_by_length(model.san, model.embed(examples.inputs), None, examples.real).alone()
    answers = model.read(terms).argmax(-1).movedim(1, 0)[:, examples.real]
    assert min(len(given.unique()) for given in answers) >= 3


@torch.no_grad()
def test_reconstruction_is_measured_against_the_models_own_logits():
    # exact reads the trace's output; forward must give the same numbers, or the error would mean nothing.
    model, examples = network(), data()
    own = model(examples.inputs, examples.real)
    trace = model.san.trace(model.embed(examples.inputs), key_padding_mask=examples.real)
    assert torch.equal(model.read(trace.output), own)


def test_a_read_out_that_is_not_linear_shows_in_the_reconstruction():
    model, examples = network(), data()
    linear = model.read
    model.read = lambda states: linear(states).tanh()
    assert pe.exact(model, examples).reconstruction > 1e-3


@torch.no_grad()
def test_padding_is_neither_read_nor_counted():
    model, examples = network(), data()
    other = copy.deepcopy(examples.inputs)
    other[~examples.real] = (other[~examples.real] + 3) % 7
    labels = examples.labels.clone()
    labels[~examples.real] = 0
    changed = Examples(other, labels, examples.real)
    for measure in (pe.exact, pe.accuracy, pe.sampled):
        assert str(measure(model, examples)) == str(measure(model, changed))


def test_a_set_without_real_tokens_counts_for_nothing():
    model, examples = network(), data()
    real = examples.real.clone()
    real[3] = False
    holed = SimpleNamespace(inputs=examples.inputs, labels=examples.labels, real=real)
    without = examples.take([i for i in range(13) if i != 3])
    for chunk in (4, 13):
        a, b = pe.exact(model, holed, chunk), pe.exact(model, without, chunk)
        assert torch.equal(a.alone, b.alone)
        torch.testing.assert_close(a.residuals, b.residuals, rtol=TIGHT, atol=0)
        assert pe.accuracy(model, holed, chunk) == pe.accuracy(model, without, chunk)
        assert torch.equal(
            pe.sampled(model, holed, 2, 2, chunk=chunk), pe.sampled(model, without, 2, 2, chunk=chunk)
        )


def test_a_network_without_layers():
    model, examples = network(L=0, dtype=F64), data()
    found = pe.exact(model, examples)
    assert (found.counts, found.alone.tolist()) == ([1], [found.full])
    assert pe.sampled(model, examples, 1).tolist() == [[found.full] * 5]


# ------------------------------------------------------------------------------------- an answer known before


def one_hop_network():
    """Two layers of one head each that copy the mean of all tokens from feature 0 to 1, and 1 to nowhere.

    Token features are ``(s, 0, 0)`` with ``s = ±1``; every token must say whether the sum of all ``s`` is
    positive, which the read-out sees in feature 1.  Only paths of length 1 write there: length 0 leaves it
    zero (and the tie goes to class 0), a second hop reads feature 1 no more.
    """
    san = SAN(2, 1, 3, head_dim=1, skip=True, norm="none")
    model = TokenClassifier(san, 2, symbols=2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.E.copy_(torch.tensor([[-1.0, 0, 0], [1, 0, 0]]))
        for layer in san.layers:
            layer.attention.W_V[0, 0, 0] = 1
            layer.attention.W_O[0, 0, 1] = 1
        model.W_out[1, 1] = 1
    return model


def test_a_network_whose_length_one_alone_answers():
    g = torch.Generator().manual_seed(0)
    inputs = torch.randint(2, (20, 5), generator=g)  # odd, so that no sum is zero
    labels = (inputs.sum(-1, keepdim=True) > 2).long().expand(20, 5)
    examples = Examples(inputs, labels, torch.ones(20, 5, dtype=torch.bool))
    model, zeros = one_hop_network(), float((labels == 0).double().mean())
    found = pe.exact(model, examples)
    assert found.alone.tolist() == [zeros, 1.0, zeros]
    assert found.cumulative.tolist() == [zeros, 1.0, 1.0]
    assert found.leave_one_out.tolist() == [1.0, zeros, 1.0]
    assert (found.full, found.bias, found.bias_norm, found.counts) == (1.0, zeros, 0.0, [1, 2, 1])
    assert found.norms[0] == 1.0
    assert found.norms[2] == found.residuals[1] == 0.0  # one hop makes all tokens equal here
    for frozen in (False, True):
        assert pe.sampled(model, examples, frozen=frozen).mean(1).tolist() == pytest.approx([zeros, 1, zeros])


# ---------------------------------------------------------------------------------------------- sampled


def normal(T, eps):
    """LayerNorm without gain and shift."""
    centred = T - T.mean()
    return centred / math.sqrt(float(centred.square().mean()) + eps)


def one_head(layer, X, h):
    """The protocol's layer on one set's real tokens, one query at a time."""
    a = layer.attention
    if layer.norm == "pre":
        X = torch.stack([normal(x, layer.norm1.eps) for x in X])
    out = []
    for x in X:
        q = x @ a.W_Q[h - 1] + a.b_Q[h - 1]
        s = torch.stack([q @ (y @ a.W_K[h - 1] + a.b_K[h - 1]) for y in X]) / math.sqrt(a.W_Q.shape[-1])
        p = s.exp() / s.exp().sum()
        mixed = sum(w * (y @ a.W_V[h - 1] + a.b_V[h - 1]) for w, y in zip(p, X, strict=True))
        out.append(mixed @ a.W_O[h - 1] + a.b_O)
    if layer.norm == "post":
        out = [normal(y, layer.norm1.eps) for y in out]
    return torch.stack(out)


@torch.no_grad()
def written_out(model, examples, paths):
    """The protocol as a loop: sets, paths, layers; only the real tokens ever enter."""
    san, right = model.san, 0
    embedded = model.embed(examples.inputs)
    for X, labels, real in zip(embedded, examples.labels, examples.real, strict=True):
        if not real.any():
            continue
        total = torch.zeros_like(X[real])
        for path in paths:
            T = X[real]
            for layer, h in zip(san.layers, path, strict=True):
                T = T if h == 0 else one_head(layer, T, h)
            total += T
        if san.norm != "none":
            total = torch.stack([normal(t, san.layers[-1].norm1.eps) for t in total])
        logits = total @ model.W_out + model.b_out
        right += int((logits.argmax(-1) == labels[real]).sum())
    return right / int(examples.real.sum())


@pytest.mark.parametrize("switches", SWITCHES[:4], ids=str)
def test_along_all_paths_of_a_length_is_the_written_out_loop(switches):
    model, examples = network(2, 2, **switches), data(7, 5)
    for k in range(3):
        paths = list(all_paths(2, 2, True, length=k))
        assert pe.along(model, examples, paths, chunk=3) == written_out(model, examples, paths)


@pytest.mark.parametrize("switches", SWITCHES[:4], ids=str)
@pytest.mark.parametrize("share", [True, False])
def test_sampled_is_the_written_out_loop_over_the_drawn_paths(switches, share):
    model, examples = network(**switches), data(7, 5)
    found = pe.sampled(model, examples, (2, 5), 2, seed=3, lengths=[3, 0, 1], chunk=4, share=share)
    assert found.shape == (2, 3, 2)
    for i, k in enumerate([3, 0, 1]):
        for r in range(2):
            drawn = pe.draw(3, 2, k, 5, 3, r)
            assert found[0, i, r] == written_out(model, examples, drawn[:2])
            assert found[1, i, r] == written_out(model, examples, drawn)


def test_sharing_changes_nothing_and_counts_are_nested():
    model, examples = network(), data()
    nested = pe.sampled(model, examples, [3, 7, 20], 3, seed=1)
    for i, count in enumerate((3, 7, 20)):
        alone = pe.sampled(model, examples, count, 3, seed=1, share=False)
        assert alone.shape == (4, 3)
        assert torch.equal(nested[i], alone)
    assert torch.equal(pe.sampled(model, examples, 3, 2, 1, [2]), nested[0, 2:3, :2])


@pytest.mark.parametrize("switches", SWITCHES[:4], ids=str)
@torch.no_grad()
def test_frozen_paths_are_the_theorems(switches):
    model, examples = network(**switches), data()
    frozen = freeze(model.san, model.embed(examples.inputs), key_padding_mask=examples.real)
    found = pe.sampled(model, examples, 4, 3, frozen=True, chunk=5)
    for k, number in enumerate([1, 6, 12, 8]):
        for r in range(3):
            T = sum(frozen.path(path) for path in pe.draw(3, 2, k, 4, 0, r)) * (number / 4)
            assert found[k, r] == answers(model, T + frozen.bias(), examples)


@pytest.mark.parametrize("switches", SWITCHES[:4], ids=str)
def test_all_frozen_paths_of_a_length_are_the_exact_term(switches):
    model, examples = network(**switches), data()
    exact = pe.exact(model, examples)
    listed = [list(all_paths(3, 2, True, length=k)) for k in range(4)]
    assert [pe.along(model, examples, paths, frozen=True) for paths in listed] == exact.alone.tolist()
    # With attention recomputed it is another network.
    assert [pe.along(model, examples, paths) for paths in listed] != exact.alone.tolist()


def test_dropout_is_off_and_training_mode_comes_back():
    model, examples = network(dropout=0.5), data()
    model.train()
    for measure in (pe.accuracy, pe.sampled, pe.exact):
        assert str(measure(model, examples)) == str(measure(model, examples))
        assert model.training
    plain = network()
    assert torch.equal(pe.sampled(model, examples), pe.sampled(plain, examples))


def test_coordinates_of_another_dtype():
    san = SAN(3, 2, 6, head_dim=3, skip=True, norm="post")
    model = TokenClassifier(san, 5, features=2)
    points = torch.randn(13, 11, 2, generator=torch.Generator().manual_seed(0))
    examples = Examples(points, data().labels, data().real)
    assert pe.exact(model, examples).full == pe.accuracy(model, examples)
    assert pe.exact(model.float(), examples).reconstruction < TIGHT


# -------------------------------------------------------------------------------------------------- draws


def test_drawn_paths_are_uniform():
    drawn = [p for r in range(40) for p in pe.draw(4, 3, 2, 100, seed=5, repeat=r)]
    counts, possible = Counter(drawn), list(all_paths(4, 3, True, length=2))
    assert set(counts) == set(possible)
    assert len(possible) == count_by_length(4, 3, True)[2] == 54
    expected = len(drawn) / 54
    chi2 = sum((counts[p] - expected) ** 2 / expected for p in possible)
    assert chi2 < 53 + 4 * math.sqrt(2 * 53)  # 53 degrees of freedom: mean and four standard deviations


def test_draws_depend_on_their_arguments_only_and_repeat():
    assert pe.draw(6, 2, 3, 5, 7, 1) == pe.draw(6, 2, 3, 100, 7, 1)[:5]
    others = [pe.draw(6, 2, 3, 5, 8, 1), pe.draw(6, 2, 3, 5, 7, 2), pe.draw(6, 2, 3, 5, 1, 7)]
    assert all(pe.draw(6, 2, 3, 5, 7, 1) != other for other in others)
    assert pe.draw(6, 2, 0, 2) == [(0,) * 6] * 2
    assert all(min(path) > 0 for path in pe.draw(6, 2, 6, 9))
    assert len(set(pe.draw(2, 1, 1, 20))) == 2  # with repetition: only two paths there are


# ---------------------------------------------------------------------------------------------- bad input


BAD = [
    ({"paths": 0}, ValueError, "paths must be at least 1, but is 0"),
    ({"paths": [5, 5]}, ValueError, r"growing order, but is \[5, 5\]"),
    ({"paths": []}, ValueError, r"growing order, but is \[\]"),
    ({"paths": 2.5}, TypeError, "paths must be a whole number"),
    ({"repeats": 0}, ValueError, "repeats must be at least 1"),
    ({"seed": -1}, ValueError, "seed must be at least 0"),
    ({"lengths": [4]}, ValueError, "length must be at most depth=3, but is 4"),
    ({"lengths": []}, ValueError, "lengths must not be empty"),
    ({"lengths": 1}, TypeError, "lengths must be a sequence, but is int 1"),
    ({"chunk": 0}, ValueError, "chunk must be at least 1"),
]


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=str)
def test_bad_numbers_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        pe.sampled(network(), data(), **arguments)


@pytest.mark.usefixtures("plain_types")
def test_networks_the_protocol_does_not_fit():
    with pytest.raises(ValueError, match=r"the SAN has MLPs"):
        pe.sampled(network(mlp=True), data())
    with pytest.raises(ValueError, match=r"the SAN has no skips"):
        pe.sampled(network(skip=False), data())
    other = network()
    other.san.layers[1].attention.pattern = torch.nn.Identity()
    with pytest.raises(ValueError, match="the pattern Identity: the protocol recomputes softmax"):
        pe.sampled(other, data())
    with pytest.raises(TypeError, match="model must have san, embed, read, but is SAN without"):
        pe.exact(network().san, data())
    with pytest.raises(TypeError, match="examples must have inputs, labels, real, but is tuple"):
        pe.accuracy(network(), (1, 2, 3))


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize("measure", [pe.accuracy, pe.exact, pe.sampled])
def test_examples_without_a_real_token(measure):
    full = data()
    with pytest.raises(ValueError, match="no real token"):
        measure(network(), full.take([]))
    with pytest.raises(TypeError, match="model must have san, embed, read, but is NoneType"):
        measure(None, full)
    with pytest.raises(TypeError, match="examples must have inputs, labels, real, but is NoneType"):
        measure(network(), None)


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize("measure", [pe.accuracy, pe.exact, pe.sampled])
def test_labels_that_the_network_does_not_know(measure):
    full = data()
    assert full.labels[full.real].max() == 4
    with pytest.raises(ValueError, match=r"examples.labels must be from 0 to 3, .* they are from 0 to 4"):
        measure(network(classes=4), full)
    negative = SimpleNamespace(inputs=full.inputs, labels=full.labels - 1, real=full.real)
    with pytest.raises(ValueError, match=r"examples.labels must be from 0 to 4, .* they are from -1 to 3"):
        measure(network(), negative)
    padding = torch.where(full.real, full.labels, -7)
    assert str(
        measure(network(), SimpleNamespace(inputs=full.inputs, labels=padding, real=full.real))
    ) == str(measure(network(), full))


@pytest.mark.usefixtures("plain_types")
def test_paths_that_are_none():
    model, examples = network(), data()
    for paths, message in (
        ([], "must all have one length, but have none"),
        ([(0, 1, 0), (1, 1, 0)], r"must all have one length, but have \[1, 2\]"),
        ([(0, 3, 0)], "expected 3 entries in 0..2"),
        ([(0, 1)], "expected 3 entries"),
        ([(0, -1, 0)], "must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            pe.along(model, examples, paths)
    with pytest.raises(TypeError, match="paths must be a sequence, but is NoneType"):
        pe.along(model, examples, None)
    with pytest.raises(TypeError, match="each of paths must be a sequence, but is int 1"):
        pe.along(model, examples, (1, 0, 2))
    with pytest.raises(ValueError, match="length must be at most depth=2"):
        pe.draw(2, 2, 3, 1)


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize("measure", [pe.accuracy, pe.exact, pe.sampled])
def test_an_overflow_is_an_error_and_no_number(measure):
    model = network(norm="none")
    with torch.no_grad():
        for layer in model.san.layers:
            layer.attention.W_O.mul_(1e200)
    with pytest.raises(ValueError, match="must be finite"):
        measure(model, data())
