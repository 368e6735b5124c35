"""Real models as sums over paths: against brute force on small ones, against Hugging Face on the packaged."""

import pytest
import torch

from rc_lib import pretrained, real_paths, recording
from rc_lib.float64 import in_float64
from tests.test_ablation import DEPTH, HEADS, inputs, small

FAMILIES = ["bert", "roberta", "electra", "distilbert", "llama", "mistral", "qwen2", "qwen3"]
LISTED = ["bert", "distilbert", "qwen2"]  # with heads few enough, or biases that matter

# Some hundreds of products in float64, each good to about 1e-15 of the largest term.
TIGHT = 1e-12


def relative(A, B):
    return float((A - B).abs().max() / B.abs().max())


def final_state(model, x):
    with in_float64(model):
        return recording.run(model, recording.as_batch(model, x))


@pytest.mark.parametrize("mlps", real_paths.MLPS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_spectrum_of_a_small_model_gives_its_final_state(name, mlps):
    model, x = small(name, torch.float32), inputs(name)
    spectrum, theirs = real_paths.freeze_model(model, x, mlps).sum_by_length(), final_state(model, x)
    assert spectrum.terms.shape == (x.shape[0], DEPTH + 1, *theirs.shape[1:])
    assert relative(spectrum.total, theirs) < TIGHT


@pytest.mark.parametrize("mlps", real_paths.MLPS)
@pytest.mark.parametrize("name", LISTED)
def test_each_length_is_the_sum_over_its_listed_paths(name, mlps):
    frozen = real_paths.freeze_model(small(name, torch.float32), inputs(name), mlps)
    listed, recursion = frozen.sum_over_paths(), frozen.sum_by_length()
    assert relative(recursion.terms, listed.terms) < TIGHT
    assert relative(recursion.total, listed.total) < TIGHT


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_one_path_by_hand(name):
    """One head of the last layer on the last but one MLP's output, from Hugging Face's own tensors."""
    model, x = small(name), inputs(name)
    frozen, l = real_paths.freeze_model(model, x), DEPTH - 1
    with in_float64(model):
        trace = pretrained.trace(model, x)
    T, layer = trace.mlp_out[l - 1], recording.layers_of(model)[l]
    if name == "bert":
        value, out = layer.attention.self.value.weight, layer.attention.output.dense.weight
        T = trace.norms[l - 1][1].linear(T)
    else:
        value, out = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        T = trace.norms[l][0].linear(T)
    heads, head = model.config.num_attention_heads, 4 if name == "llama" else 1
    d_v, group = out.shape[1] // heads, head // (out.shape[1] // value.shape[0])
    T = trace.attention[l][:, head] @ (T @ value[group * d_v : (group + 1) * d_v].T)
    T = T @ out[:, head * d_v : (head + 1) * d_v].T
    if name == "bert":
        T = trace.norms[l][1].linear(trace.norms[l][0].linear(T))
    else:
        T = trace.final_norm.linear(T)
    assert relative(frozen.path((head + 1,), source=l), T.detach()) < TIGHT


def test_grouped_heads_share_their_values():
    model = small("llama")
    weights = real_paths.head_weights(model, 0)
    H = model.config.num_attention_heads
    shared = H // model.config.num_key_value_heads
    assert shared > 1
    for h in range(H):
        assert torch.equal(weights.W_V[h], weights.W_V[h - h % shared])
    assert not torch.equal(weights.W_V[0], weights.W_V[shared])


def test_gates_count_paths_of_the_embedding_only():
    x = inputs("bert")
    frozen = real_paths.freeze_model(small("bert"), x, "gates")
    assert sum(frozen.count_by_length()) == (HEADS + 1) ** DEPTH
    assert len(frozen.sources) == 1


def test_relu_and_other_activations():
    model = small("bert")
    model.config.hidden_act = "relu"
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = torch.nn.ReLU()
    x = inputs("bert")
    frozen = real_paths.freeze_model(model, x, "gates")
    assert relative(frozen.sum_by_length().total, final_state(model, x)) < TIGHT
    model.config.hidden_act = "tanh"
    with pytest.raises(ValueError, match="activation"):
        real_paths.freeze_model(model, x, "gates")


def test_minilm_reconstructs_hugging_faces_float64_state():
    model = pretrained.load("minilm", dtype=torch.float64)
    x = pretrained.tokens(model, n=2, length=31)
    with torch.no_grad():
        theirs = model(x).last_hidden_state  # no help of ours
    narrow = real_paths.freeze_model(pretrained.load("minilm"), x)
    assert relative(narrow.sum_by_length().total, theirs) < 1e-10
    gates = real_paths.freeze_model(model, x, "gates")
    assert relative(gates.sum_by_length().total, theirs) < 1e-10


@pytest.mark.slow
def test_smollm2_reconstructs_hugging_faces_float64_state():
    """Needs 2 GB: the whole model in float64, run by Hugging Face, and the spectrum of the float32 one."""
    model = pretrained.load("smollm2")
    x = pretrained.tokens(model, n=1, length=23, kind="prose")
    total = real_paths.freeze_model(model, x).sum_by_length().total
    model = model.double()
    with torch.no_grad():
        plain = model.model(x, use_cache=False).last_hidden_state
    # Rotary angles are float32 constants in both; Hugging Face's own pass has float32 norms and softmax.
    assert relative(total, final_state(model, x)) < 1e-8
    assert relative(total, plain) < 1e-4


def test_bad_input(plain_types):
    model, x = small("bert"), inputs("bert")
    with pytest.raises(ValueError, match="mlps"):
        real_paths.freeze_model(model, x, "both")
    with pytest.raises(ValueError, match=r"expected one of .*bert"):
        real_paths.freeze_model(small("xlnet"), inputs("xlnet"))
    with pytest.raises(ValueError, match="layer must be below"):
        real_paths.head_weights(model, DEPTH)
    with pytest.raises(ValueError, match="layer"):
        real_paths.head_weights(model, -1)
