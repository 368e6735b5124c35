import copy
import math

import pytest
import torch

from rc_lib.san import SAN, LayerNorm
from rc_lib.tasks import convex_hull, memorization, sorting
from rc_lib.token_classifier import TokenClassifier, for_task

# A prime of its own for every axis.
N, n, d, CLASSES, SYMBOLS, FEATURES = 7, 11, 13, 5, 17, 3


def san(**switches):
    return SAN(2, 1, d, skip=True, norm="post", **switches)


def symbols(seed=0, count=N, length=n):
    return torch.randint(SYMBOLS, (count, length), generator=torch.Generator().manual_seed(seed))


def points(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, n, FEATURES, dtype=torch.float64, generator=g)


def test_shapes_for_symbols_and_for_coordinates():
    model = TokenClassifier(san(), CLASSES, symbols=SYMBOLS, positions=19)
    assert model.embed(symbols()).shape == (N, n, d)
    assert model(symbols()).shape == (N, n, CLASSES)
    assert model.p.shape == (19, d)
    model = TokenClassifier(san(), CLASSES, features=FEATURES)
    assert model.embed(points()).shape == (N, n, d)
    assert model(points()).shape == (N, n, CLASSES)
    assert model.read(torch.zeros(2, N, n, d, dtype=torch.float64)).shape == (2, N, n, CLASSES)


def test_every_step_by_hand():
    model = TokenClassifier(san(), CLASSES, symbols=SYMBOLS, positions=n)
    torch.nn.init.normal_(model.b_out)
    ids = symbols()
    X = torch.stack([torch.stack([model.E[i] + model.p[k] for k, i in enumerate(row)]) for row in ids])
    assert torch.equal(model.embed(ids), X)
    Y = model.san(X)
    logits = torch.einsum("bnd,dc->bnc", Y, model.W_out) + model.b_out
    # two orders of summing 13 products of size 1
    assert torch.allclose(model(ids), logits, atol=1e-12, rtol=0)

    model = TokenClassifier(san(), CLASSES, features=FEATURES)
    torch.nn.init.normal_(model.b_in)
    x = points()
    X = torch.einsum("bnc,cd->bnd", x, model.W_in) + model.b_in
    assert torch.allclose(model.embed(x), X, atol=1e-12, rtol=0)


def test_depth_zero_reads_each_token_by_itself():
    model = TokenClassifier(SAN(0, 1, d), CLASSES, symbols=SYMBOLS)
    ids = torch.tensor([[3, 4, 3]])
    assert torch.equal(model(ids), model.read(model.E[ids]))


def test_padding_changes_nothing_for_real_tokens():
    model = TokenClassifier(san(), CLASSES, symbols=SYMBOLS)
    short = symbols(length=5)
    long = torch.cat([short, symbols(seed=1, length=6)], 1)
    real = torch.arange(n).expand(N, n) < 5
    # the same sums with zeros added
    assert torch.allclose(model(long, real)[:, :5], model(short), atol=1e-12, rtol=0)
    assert not torch.allclose(model(long)[:, :5], model(short), atol=1e-3)
    assert model(long, real).isfinite().all()


def test_without_positions_the_order_does_not_matter_and_with_them_it_does():
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    model = TokenClassifier(san(), CLASSES, symbols=SYMBOLS)
    # attention's sums in another order
    assert torch.allclose(model(symbols()[:, order]), model(symbols())[:, order], atol=1e-12, rtol=0)
    model = TokenClassifier(san(), CLASSES, symbols=SYMBOLS, positions=n)
    assert not torch.allclose(model(symbols()[:, order]), model(symbols())[:, order], atol=1e-3)


def test_equal_tokens_of_one_set_get_equal_answers_without_positions():
    # what memorization's ceiling rests on
    task = memorization.make(pairs=6, tokenizer="words")
    model = for_task(task, 2, 2, 6, dtype=torch.float64)
    logits = model(task.train.inputs, task.train.real)
    for ids, real, one in zip(task.train.inputs, task.train.real, logits, strict=True):
        for token in ids[real].unique():
            same = one[real & (ids == token)]
            assert torch.allclose(same, same[:1].expand_as(same), atol=1e-12, rtol=0)


def test_weights_follow_the_seed_and_nothing_else():
    def build(seed, **options):
        return TokenClassifier(san(seed=0), CLASSES, symbols=SYMBOLS, seed=seed, **options)

    torch.manual_seed(1)
    a = build(0, positions=n)
    torch.manual_seed(2)
    b = build(0, positions=n)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    # a switch does not move the other weights
    assert torch.equal(build(0).W_out, a.W_out)
    assert torch.equal(build(0).E, a.E)
    assert not torch.equal(build(1).E, a.E)
    # and the parts of one model are drawn apart
    rows = [a.E.flatten()[:11], a.p.flatten()[:11], a.W_out.flatten()[:11] * 0.02 * d**0.5]
    rows += [a.san.layers[0].attention.W_Q.flatten()[:11] * 0.02 * d**0.5]
    C = torch.corrcoef(torch.stack(rows)).fill_diagonal_(0)
    assert C.abs().max() < 0.95


def test_initial_scales():
    model = TokenClassifier(SAN(1, 1, 211), 101, symbols=307, positions=103)
    # 1/√(2 · numbers) is the relative error of a standard deviation: below 0.5% here, 2% is four times that
    for weight, std in ((model.E, 0.02), (model.p, 0.02), (model.W_out, 211**-0.5)):
        assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert model.b_out.abs().max() == 0
    model = TokenClassifier(SAN(1, 1, 997), 2, features=FEATURES, init_std=0.5)
    assert model.W_in.std().item() == pytest.approx(FEATURES**-0.5, rel=0.06)
    wide = TokenClassifier(SAN(1, 1, 211), 2, symbols=307, init_std=0.5)
    assert wide.E.std().item() == pytest.approx(0.5, rel=0.02)


def test_norms_are_frozen_unless_affine():
    inner = san()
    for module in inner.modules():
        if isinstance(module, LayerNorm):
            torch.nn.init.normal_(module.weight)
            torch.nn.init.normal_(module.bias)
    model = TokenClassifier(copy.deepcopy(inner), CLASSES, symbols=SYMBOLS)
    norms = [m for m in model.modules() if isinstance(m, LayerNorm)]
    assert len(norms) == 2
    assert all((m.weight == 1).all() and (m.bias == 0).all() for m in norms)
    assert not any(p.requires_grad for m in norms for p in m.parameters())
    # the attention's biases are trained
    assert all(p.requires_grad for p in model.san.layers[0].attention.parameters())
    model = TokenClassifier(copy.deepcopy(inner), CLASSES, symbols=SYMBOLS, affine=True)
    assert torch.equal(model.san.layers[0].norm1.weight, inner.layers[0].norm1.weight)
    assert all(p.requires_grad for p in model.parameters())


def test_every_trainable_weight_gets_a_gradient():
    model = TokenClassifier(san(), CLASSES, symbols=SYMBOLS, positions=n, affine=True)
    model(symbols()).pow(2).sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert still == []


def test_a_double_copy_reads_the_same_inputs():
    task = convex_hull.make(train=5, test=3)
    model = for_task(task, 2, 3, 12)
    double = copy.deepcopy(model).double()
    assert model(task.test.inputs).dtype == torch.float32
    assert double(task.test.inputs).dtype == torch.float64
    assert model(task.test.inputs.double()).dtype == torch.float32
    # float32 rounding through two layers
    assert torch.allclose(double(task.test.inputs).float(), model(task.test.inputs), atol=1e-4)
    task = sorting.make(train=5, test=3)
    double = copy.deepcopy(for_task(task, 2, 3, 12)).double()
    assert double(task.test.inputs).dtype == torch.float64


def test_it_survives_saving_and_loading(tmp_path):
    task = sorting.make(train=5, test=3)
    model = for_task(task, 2, 2, 8, seed=1)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = for_task(task, 2, 2, 8, seed=2)
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(task.test.inputs), model(task.test.inputs))


def test_for_task_builds_the_papers_network():
    task = sorting.make(train=5, test=3, symbols=6, length=4)
    model = for_task(task, 6, 2, 48)
    assert (model.san.depth, model.san.heads, model.san.dim) == (6, 2, 48)
    assert (model.san.skip, model.san.norm, model.san.mlp, model.san.final_norm) == (
        True,
        "post",
        False,
        None,
    )
    assert (model.classes, model.symbols, model.features, model.positions) == (6, 6, None, 4)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    hull = for_task(convex_hull.make(train=5, test=3), 1, 3, 84)
    assert (hull.classes, hull.symbols, hull.features, hull.positions) == (2, None, 2, None)
    memo = memorization.make(pairs=3, tokenizer="words")
    assert for_task(memo, 1, 1, 4).symbols == memo.symbols
    pre = for_task(task, 2, 2, 8, norm="pre", dropout=0.5, dtype=torch.float64)
    assert pre.san.final_norm is not None
    assert not pre.san.final_norm.weight.requires_grad
    assert pre.W_out.dtype == torch.float64
    assert not torch.equal(pre(task.test.inputs), pre(task.test.inputs))  # dropout in train()
    pre.eval()
    assert torch.equal(pre(task.test.inputs), pre(task.test.inputs))
    assert for_task(task, 0, 1, 4).W_out.dtype == torch.float32
    assert for_task(task, 0, 1, 4, dtype=torch.float64).W_out.dtype == torch.float64
    assert for_task(task, 1, 1, 4, affine=True).san.layers[0].norm1.weight.requires_grad
    assert for_task(task, 1, 1, 97, init_std=1.0).E.std() > 0.8


def test_one_seed_is_one_network_in_both_precisions():
    task = sorting.make(train=5, test=3)
    a, b = for_task(task, 2, 2, 8, seed=4), for_task(task, 2, 2, 8, seed=4, dtype=torch.float64)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y.float())


def test_a_few_steps_learn_a_tiny_task():
    task = sorting.make(seed=1, train=20, test=7, symbols=3, length=3)
    model = for_task(task, 2, 2, 16)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        logits = model(task.train.inputs)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), task.train.labels.flatten()).backward()
        optimiser.step()
    right = (model(task.train.inputs).argmax(-1) == task.train.labels).double().mean()
    assert right > 0.95  # sixty labels and a thousand weights; the majority class is right for 0.4


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"symbols": SYMBOLS, "features": FEATURES}, ValueError, "symbols=17, features=3"),
        ({}, ValueError, "symbols=None, features=None"),
        ({"symbols": 0}, ValueError, "symbols"),
        ({"features": 0}, ValueError, "features"),
        ({"symbols": SYMBOLS, "classes": 0}, ValueError, "classes"),
        ({"symbols": SYMBOLS, "positions": 0}, ValueError, "positions"),
        ({"symbols": SYMBOLS, "affine": 1}, TypeError, "affine"),
        ({"symbols": SYMBOLS, "seed": "0"}, TypeError, "seed"),
        ({"symbols": SYMBOLS, "init_std": math.nan}, ValueError, "init_std"),
        ({"symbols": SYMBOLS, "san": torch.nn.Linear(2, 2)}, TypeError, "san must be a SAN"),
    ],
)
def test_bad_settings_are_named(arguments, error, message):
    arguments = {"san": san(), "classes": CLASSES, **arguments}
    with pytest.raises(error, match=message):
        TokenClassifier(**arguments)


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (torch.zeros(N, n), TypeError, "inputs must be int64 symbols"),
        (torch.zeros(N, n, dtype=torch.int32), TypeError, "inputs must be int64 symbols"),
        ([[1, 2]], TypeError, "inputs must be int64 symbols"),
        (torch.zeros(n, dtype=torch.int64), ValueError, r"\[N, n\]"),
        (torch.zeros(0, n, dtype=torch.int64), ValueError, "not empty"),
        (torch.tensor([[0, SYMBOLS]]), ValueError, "from 0 to 16, but they are from 0 to 17"),
        (torch.tensor([[-1, 2]]), ValueError, "from -1 to 2"),
        (torch.zeros(2, n + 1, dtype=torch.int64), ValueError, "12 tokens, but there are positions=11"),
    ],
)
def test_bad_symbols_are_named(inputs, error, message):
    model = TokenClassifier(san(), CLASSES, symbols=SYMBOLS, positions=n)
    with pytest.raises(error, match=message):
        model(inputs)


@pytest.mark.usefixtures("plain_types")
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (torch.zeros(N, n, 2), ValueError, r"expected \[N, n, 3\]"),
        (torch.zeros(n, FEATURES), ValueError, r"expected \[N, n, 3\]"),
        (torch.zeros(N, n, FEATURES, dtype=torch.int64), TypeError, "inputs must hold floating-point"),
        (torch.full((1, 2, FEATURES), math.nan), ValueError, r"inputs\[0, 0, 0\] is nan"),
        (torch.zeros(0, n, FEATURES), ValueError, "empty"),
    ],
)
def test_bad_coordinates_are_named(inputs, error, message):
    model = TokenClassifier(san(), CLASSES, features=FEATURES)
    with pytest.raises(error, match=message):
        model(inputs)


@pytest.mark.usefixtures("plain_types")
def test_bad_states_padding_and_tasks_are_named():
    model = TokenClassifier(san(), CLASSES, symbols=SYMBOLS)
    with pytest.raises(ValueError, match=r"expected \[..., n, 13\]"):
        model.read(torch.zeros(n, d + 1, dtype=torch.float64))
    with pytest.raises(TypeError, match="the weights are float64"):
        model.read(torch.zeros(n, d))
    with pytest.raises(TypeError, match="boolean"):
        model(symbols(), torch.ones(N, n))
    with pytest.raises(ValueError, match="key_padding_mask"):
        model(symbols(), torch.ones(N, n + 1, dtype=torch.bool))
    with pytest.raises(TypeError, match="task must be a Task"):
        for_task(model, 1, 1, 4)
