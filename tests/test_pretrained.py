"""Tokens for each model, measuring layer by layer, the language-model loss, the bars for trained weights."""

import subprocess
import sys
import textwrap

import pytest
import torch
import transformers as hf
from torch import nn

from rc_lib import corpus, pretrained, rank
from rc_lib.ablation import ablate
from tests.test_ablation import CONFIGS, DEPTH, VOCABULARY, inputs, small


@pytest.fixture(scope="module")
def minilm():
    return pretrained.load("minilm")


@pytest.fixture(scope="module")
def albert():
    return pretrained.load("albert-base", trained=False)


def test_tokens_of_each_model(minilm, albert):
    assert torch.equal(pretrained.tokens(minilm), corpus.tokens())
    assert torch.equal(
        pretrained.tokens(minilm, n=3, length=11, kind="prose"), corpus.tokens(3, 11, kind="prose")
    )
    assert torch.equal(pretrained.tokens(albert, n=5), corpus.fold(corpus.tokens(n=5), 30000))
    assert pretrained.tokens(minilm, "A text of yours").shape == (1, 6)


def test_a_model_of_unknown_origin_needs_ids(plain_types):
    with pytest.raises(ValueError, match=r"did not come from pretrained\.load.*pass token ids"):
        pretrained.trace(small("bert"), "text")


@pytest.mark.parametrize("name", ["bert", "albert", "xlnet", "llama", "vit"])
@pytest.mark.parametrize("variant", pretrained.VARIANTS.values(), ids=pretrained.VARIANTS)
def test_measuring_layer_by_layer_equals_measuring_the_trace(name, variant):
    model, x = small(name), inputs(name)
    hidden = pretrained.trace(model, x, **variant).stacked()
    seen = pretrained.measure(model, x, **variant, batch_size=1)
    assert seen.shape == (DEPTH + 1, 2)
    # A collapsed state's residual is rounding error, which batches of another size round otherwise.
    torch.testing.assert_close(seen, rank.relative_residual(hidden), rtol=1e-6, atol=1e-12)
    norms = pretrained.measure(model, x, lambda X: X.square().sum((-1, -2)), **variant)
    torch.testing.assert_close(norms, hidden.square().sum((-1, -2)), rtol=1e-6, atol=1e-12)


def test_minilm_collapses_without_skips_and_not_with_them(minilm):
    """The issue's bar for trained weights and real text."""
    ids = pretrained.tokens(minilm)
    san = pretrained.measure(minilm, ids, skip=False, mlp=False).mean(1)
    assert san[3] < 0.01
    assert (san[1:5] < san[:4]).all()
    # float32's eps is 1.2e-7; at the floor only its size is known
    assert san[5:].max() < 1e-6
    few = ids[::4]
    assert pretrained.measure(minilm, few).mean(1).min() > 0.6
    assert pretrained.measure(minilm, few, mlp=False).mean(1).min() > 0.6
    assert pretrained.measure(minilm, few, skip=False).mean(1)[4] < 0.01


def test_language_model_loss_equals_hugging_faces():
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(CONFIGS["llama"]).double().eval()
    ids = torch.randint(0, VOCABULARY, (5, 7))
    with torch.no_grad():
        theirs = model(ids, labels=ids).loss.item()
    for batch_size, chunk in ((1, 1), (2, 4), (5, 256)):
        ours = pretrained.language_model_loss(model, ids, batch_size=batch_size, chunk=chunk)
        # Hugging Face takes the loss in float32
        assert abs(ours - theirs) < 1e-5


def test_a_uniform_guess_scores_log_vocabulary():
    model = hf.LlamaForCausalLM(CONFIGS["llama"])
    nn.init.zeros_(model.lm_head.weight)
    loss = pretrained.language_model_loss(model, torch.tensor([[3, 1, 4]]))
    assert abs(loss - torch.tensor(float(VOCABULARY)).log().item()) < 1e-6


def test_the_loss_of_an_ablated_model_is_worse_than_before():
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(CONFIGS["llama"]).eval()
    ids = torch.randint(0, VOCABULARY, (2, 7))
    whole = pretrained.language_model_loss(model, ids)
    with ablate(model, skip=False):
        assert pretrained.language_model_loss(model, ids) != whole
    assert pretrained.language_model_loss(model, ids) == whole


def test_loss_needs_a_decoder_and_two_tokens(plain_types):
    with pytest.raises(ValueError, match="decoder with a language-model head, but is a BertModel"):
        pretrained.language_model_loss(small("bert"), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"at least two tokens a row, but has shape \(3, 1\)"):
        pretrained.language_model_loss(
            hf.LlamaForCausalLM(CONFIGS["llama"]), torch.ones(3, 1, dtype=torch.long)
        )


# ---------------------------------------------------------------------------------------------------
# SmolLM2, in a process of its own: its peak memory is part of the promise


@pytest.mark.slow
def test_smollm2_reads_real_text_in_little_memory():
    code = r"""
        import pathlib, re, resource, sys, torch
        from rc_lib import pretrained
        model = pretrained.load("smollm2")
        ids = pretrained.tokens(model, n=8)
        loss = pretrained.language_model_loss(model, ids)
        trace = pretrained.trace(model, ids[:1], skip=False)
        P = trace.attention[29]
        assert P.shape == (1, 9, 128, 128) and len(trace.hidden) == 31
        assert (P.sum(-1) - 1).abs().max() < 1e-5
        # On Linux ru_maxrss starts at the size of the process that started this one; VmHWM does not.
        status = pathlib.Path("/proc/self/status")
        if status.exists():
            peak = 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1])
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(loss, peak)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loss, peak = map(float, done.stdout.split())
    assert loss < 3.6
    assert peak < 1.5e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "a"}, "seed must be"),
        ({"seed": -1}, "seed must be"),
        ({"device": "nowhere"}, "device='nowhere': expected a device of this machine"),
        ({"dtype": torch.int64}, "dtype must be"),
    ],
)
def test_load_names_a_bad_argument(plain_types, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pretrained.load("bert-base", **({"trained": False} | changes))


def test_a_model_of_another_kind_is_named(plain_types):
    with pytest.raises(TypeError, match="model must be a Hugging Face model, but is a Linear"):
        pretrained.trace(torch.nn.Linear(2, 2), torch.tensor([1]))
