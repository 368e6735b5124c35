"""Ablating real architectures: small models of every family, random weights and biases, float64."""

import pytest
import torch
import transformers as hf
from torch import nn

from rc_lib import ablation, pretrained
from rc_lib.ablation import ablate, ablated, family_of, layers_of

# A prime for every axis (even head sizes where rotary halves or a division need them).
BATCH, TOKENS, HEADS, DEPTH, VOCABULARY = 2, 7, 3, 5, 53
DIM, INNER = 30, 17
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": DIM,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 23,
}
GROUPED = COMMON | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0}
IMAGE = {"image_size": 6, "patch_size": 3, "num_channels": 2}
CONFIGS = {
    "bert": hf.BertConfig(**COMMON, hidden_dropout_prob=0.5),
    "roberta": hf.RobertaConfig(**COMMON),
    "xlm-roberta": hf.XLMRobertaConfig(**COMMON),
    "camembert": hf.CamembertConfig(**COMMON),
    "electra": hf.ElectraConfig(**COMMON, embedding_size=11),
    "distilbert": hf.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=DIM,
        n_layers=DEPTH,
        n_heads=HEADS,
        hidden_dim=INNER,
        max_position_embeddings=23,
    ),
    "albert": hf.AlbertConfig(**COMMON, embedding_size=11),
    "albert-groups": hf.AlbertConfig(
        **{**COMMON, "num_hidden_layers": 4}, embedding_size=11, num_hidden_groups=2, inner_group_num=2
    ),
    "xlnet": hf.XLNetConfig(vocab_size=VOCABULARY, d_model=DIM, n_layer=DEPTH, n_head=HEADS, d_inner=INNER),
    "llama": hf.LlamaConfig(**GROUPED),
    "mistral": hf.MistralConfig(**GROUPED, sliding_window=4),
    "qwen2": hf.Qwen2Config(**{k: v for k, v in GROUPED.items() if k != "head_dim"} | {"hidden_size": 24}),
    "qwen3": hf.Qwen3Config(**GROUPED),
    "gpt2": hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=DIM, n_layer=DEPTH, n_head=HEADS, n_inner=INNER, n_positions=23
    ),
    "vit": hf.ViTConfig(**{k: v for k, v in COMMON.items() if "_s" in k or "num" in k}, **IMAGE),
    "deit": hf.DeiTConfig(**{k: v for k, v in COMMON.items() if "_s" in k or "num" in k}, **IMAGE),
}
PRE_NORM = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "vit", "deit")
CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
VARIANTS = list(pretrained.VARIANTS.values())


def small(name: str, dtype=torch.float64) -> nn.Module:
    """Build a model whose biases and gains matter: Hugging Face starts with zeros and ones."""
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(CONFIGS[name], attn_implementation="eager").to(dtype).eval()
    for path, weight in model.named_parameters():
        norm = "norm" in path.lower() or "ln_" in path
        nn.init.normal_(weight, mean=float(norm and path.endswith("weight")), std=0.3)
    return model


def inputs(name: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    if name in ("vit", "deit"):
        return torch.randn(BATCH, 2, 6, 6, generator=g, dtype=torch.float64)
    return torch.randint(4, VOCABULARY, (BATCH, TOKENS), generator=g)


class Calls:
    """Keep each layer call's arguments, so that a layer can be run again alone."""

    def __init__(self, model):
        self.made = []
        self.hooks = [
            layer.register_forward_pre_hook(self._keep, with_kwargs=True) for layer in layers_of(model)
        ]

    def _keep(self, layer, args, kwargs):
        self.made.append((layer, args, kwargs))

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def by_hand_albert(layer, x, args, kwargs):
    attention, split = layer.attention, (*x.shape[:2], HEADS, -1)
    q, k, v = (m(x).view(split).transpose(1, 2) for m in (attention.query, attention.key, attention.value))
    P = (q @ k.mT / (DIM // HEADS) ** 0.5).softmax(-1)
    return attention.dense((P @ v).transpose(1, 2).flatten(2))


def by_hand_xlnet(layer, x, args, kwargs):
    attention = layer.rel_attn
    q, k, v = (torch.einsum("ibh,hnd->ibnd", x, w) for w in (attention.q, attention.k, attention.v))
    r = torch.einsum("ibh,hnd->ibnd", kwargs["r"].to(x.dtype), attention.r)
    heads = attention.rel_attn_core(q, k, v, r)
    return torch.einsum("ibnd,hnd->ibh", heads, attention.o)


def attention_of(name, layer, x, args, kwargs):
    """A(x), or A(LN(x)) for pre-norm families: what the skip is added to."""
    if name.startswith("albert"):
        return by_hand_albert(layer, x, args, kwargs)
    if name == "xlnet":
        return by_hand_xlnet(layer, x, args, kwargs)
    if name == "distilbert":
        return layer.attention(x, *args[1:], **kwargs)[0]
    if name == "gpt2":
        return layer.attn(layer.ln_1(x), attention_mask=args[2])[0]
    if name in ("vit", "deit"):
        return layer.attention(layer.layernorm_before(x), *args[1:], **kwargs)[0]
    if name in PRE_NORM:
        return layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)[0]
    return layer.attention.output.dense(layer.attention.self(x, args[1])[0])


def after_attention(name, layer):
    if name.startswith("albert"):
        return layer.attention.LayerNorm
    if name == "xlnet":
        return layer.rel_attn.layer_norm
    return layer.sa_layer_norm if name == "distilbert" else layer.attention.output.LayerNorm


def feed_forward(name, layer, a):
    if name.startswith("albert"):
        return layer.full_layer_layer_norm(a + layer.ffn_output(layer.activation(layer.ffn(a))))
    if name == "xlnet":
        ff = layer.ff
        return ff.layer_norm(a + ff.layer_2(ff.activation_function(ff.layer_1(a))))
    if name == "distilbert":
        return layer.output_layer_norm(a + layer.ffn(a))
    if name in PRE_NORM:
        names = {"gpt2": "ln_2", "vit": "layernorm_after", "deit": "layernorm_after"}
        return a + layer.mlp(getattr(layer, names.get(name, "post_attention_layernorm"))(a))
    return layer.output.LayerNorm(a + layer.output.dense(layer.intermediate(a)))


def written_out(name, layer, args, kwargs, skip, mlp):
    """One layer of figure 2's variants, from the layer's own parts."""
    x = args[0]
    a = attention_of(name, layer, x, args, kwargs)
    a = a + x if skip else a
    a = a if name in PRE_NORM else after_attention(name, layer)(a)
    return feed_forward(name, layer, a) if mlp else a


@pytest.mark.parametrize("variant", VARIANTS, ids=pretrained.VARIANTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_of_every_variant_is_the_written_out_layer(name, variant):
    model = small(name)
    calls = Calls(model)
    trace = pretrained.trace(model, inputs(name), **variant)
    calls.remove()
    assert len(calls.made) == trace.depth == len(trace.hidden) - 1
    for l, (layer, args, kwargs) in enumerate(calls.made):
        with torch.no_grad():
            expected = written_out(name, layer, args, kwargs, **variant)
        expected = expected.transpose(0, 1) if name == "xlnet" else expected
        # The same products in the same order, one association apart: a few units of float64's last place.
        torch.testing.assert_close(trace.hidden[l + 1], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_whole_model_equals_hugging_faces_own_output(name):
    model = small(name)
    x = inputs(name)
    with torch.no_grad():
        # GPT-2's cache lays keys out differently in memory, which moves the last bit: compare without.
        cache = {"use_cache": False} if name in CAUSAL else {}
        theirs = model(x, output_hidden_states=True, output_attentions=True, **cache)
    ours = pretrained.trace(model, x)
    for l, (a, b) in enumerate(zip(ours.hidden, theirs.hidden_states, strict=False)):
        normed = l == DEPTH and name in CAUSAL  # here Hugging Face's last entry is after the final norm
        assert torch.equal(ours.output if normed else a, b)
    for a, b in zip(ours.attention, theirs.attentions, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ours.output, theirs.last_hidden_state)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_variants_differ_from_the_first_layer_on(name):
    model, x = small(name), inputs(name)
    first = [pretrained.trace(model, x, **variant).hidden[1] for variant in VARIANTS]
    starts = [pretrained.trace(model, x, **variant).hidden[0] for variant in VARIANTS]
    for i in range(4):
        assert torch.equal(starts[i], starts[0])
        for j in range(i):
            assert (first[i] - first[j]).abs().max() > 1e-3


def snapshot(model):
    """Everything that an ablation could leave behind on a module, weights by their bits."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    )
    attributes = [
        (path, sorted(m.__dict__), [len(m.__dict__[h]) for h in hooks]) for path, m in model.named_modules()
    ]
    modes = [m.training for m in model.modules()]
    return attributes, modes, [w.clone() for w in model.state_dict().values()]


def assert_same(before, after):
    assert before[:2] == after[:2]
    assert all(torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_is_restored(name):
    model, x = small(name).train(), inputs(name)
    next(model.children()).eval()  # a mixture of modes must come back as it was
    before = snapshot(model)
    with ablate(model, skip=False, mlp=False):
        assert ablated(model) == (False, False)
        inside = pretrained.trace(model, x).hidden[-1]
    assert_same(before, snapshot(model))
    pretrained.trace(model, x, skip=False, mlp=False)
    assert_same(before, snapshot(model))
    assert ablated(model) == (True, True)
    again = pretrained.trace(model, x, skip=False, mlp=False).hidden[-1]
    assert torch.equal(inside, again)


@pytest.mark.parametrize("name", ["bert", "albert", "xlnet", "llama"])
def test_the_model_is_restored_after_an_error_inside(name):
    model, x = small(name), inputs(name)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="mine"), ablate(model, skip=False, mlp=False):
        raise RuntimeError("mine")
    assert_same(before, snapshot(model))

    def fail(module, args):
        raise RuntimeError("in the forward pass")

    hook = layers_of(model)[-1].register_forward_hook(lambda m, a, o: fail(m, a))
    with pytest.raises(RuntimeError, match="forward pass"):
        pretrained.trace(model, x, skip=False, mlp=False)
    hook.remove()
    assert_same(before, snapshot(model))
    assert torch.equal(pretrained.trace(model, x).output, pretrained.trace(small(name), x).output)


@pytest.mark.parametrize("name", CONFIGS)
def test_nested_ablations_add_up(name):
    model, x = small(name), inputs(name)
    san = pretrained.trace(model, x, skip=False, mlp=False).hidden[-1]
    with ablate(model, skip=False):
        with ablate(model, skip=False, mlp=False):
            assert torch.equal(pretrained.trace(model, x).hidden[-1], san)
        assert ablated(model) == (False, True)
        assert torch.equal(pretrained.trace(model, x, mlp=False).hidden[-1], san)
        only_skip = pretrained.trace(model, x).hidden[-1]
    assert torch.equal(only_skip, pretrained.trace(model, x, skip=False).hidden[-1])
    assert ablated(model) == (True, True)


@pytest.mark.parametrize("variant", VARIANTS, ids=pretrained.VARIANTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_attention_matrices_are_stochastic(name, variant):
    trace = pretrained.trace(small(name), inputs(name), **variant)
    n = trace.hidden[0].shape[-2]
    heads = 6 if name in CAUSAL and name != "gpt2" else HEADS
    for P in trace.attention:
        assert P.shape == (BATCH, heads, n, n)
        assert P.min() >= 0
        # Llama's family computes the softmax in float32 whatever the model's dtype: eps is 1.2e-7.
        torch.testing.assert_close(P.sum(-1), torch.ones(BATCH, heads, n, dtype=P.dtype), rtol=0, atol=1e-6)
        if name in CAUSAL:
            assert torch.equal(P, P.tril())
        else:
            assert P.min() > 0


def test_the_attention_sees_the_true_input_where_the_skip_is_removed():
    """A removed skip passes zeros to the adding module; were they to reach the scores, P would be uniform."""
    for name in CONFIGS:
        P = pretrained.trace(small(name), inputs(name), skip=False, mlp=False).attention[0]
        full = pretrained.trace(small(name), inputs(name)).attention[0]
        assert torch.equal(P, full)


@pytest.mark.parametrize("name", ["bert", "albert", "xlnet", "distilbert"])
def test_a_residual_far_below_eps_survives_in_post_norm(name):
    """Attention output 1e-20 of the input's size: adding and subtracting the skip would leave exact zeros."""
    model, x = small(name), inputs(name)
    for path, w in model.named_parameters():
        out = {"bert": "attention.output.dense", "albert": "attention.dense", "distilbert": "out_lin"}.get(
            name
        )
        if name == "xlnet" and path.endswith("rel_attn.o"):
            w.data *= 1e-20
        elif out is not None and out in path:
            w.data *= 1e-20 if path.endswith("weight") else 0.0
    calls = Calls(model)
    pretrained.trace(model, x, skip=False, mlp=False)
    calls.remove()
    layer, args, kwargs = calls.made[0]
    with torch.no_grad():
        A = attention_of(name, layer, args[0], args, kwargs)
        A = A.transpose(0, 1) if name == "xlnet" else A
        norm = after_attention(name, layer)
    assert 0 < A.abs().max() < 1e-17
    # The norm's eps dominates its variance, so it is linear here: centre, divide by sqrt(eps), scale, shift.
    centred = (A - A.mean(-1, keepdim=True)) / norm.eps**0.5 * norm.weight.detach()
    norm.bias.data.zero_()  # a shift of order one would hide all but its first 16 digits
    seen = pretrained.trace(model, x, skip=False, mlp=False).hidden[1]
    torch.testing.assert_close(seen, centred, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_a_residual_far_below_eps_survives_in_pre_norm(name):
    model, x = small(name), inputs(name)
    whole = pretrained.trace(model, x, skip=False, mlp=False).hidden[1]
    for path, w in model.named_parameters():
        if "o_proj" in path or "attn.c_proj" in path:
            w.data *= 2.0**-100
    tiny = pretrained.trace(model, x, skip=False, mlp=False).hidden[1]
    # A power of two scales every float exactly.
    assert torch.equal(tiny, whole * 2.0**-100)
    assert tiny.abs().max() > 0


def test_a_hand_computed_layer():
    """Two tokens, one head, W_V = W_O = I, equal scores: attention averages, LayerNorm makes ±1."""
    config = hf.BertConfig(
        vocab_size=5, hidden_size=2, num_hidden_layers=1, num_attention_heads=1, intermediate_size=2
    )
    model = hf.BertModel(config, add_pooling_layer=False).double().eval()
    layer = model.encoder.layer[0]
    for weight in layer.parameters():
        nn.init.zeros_(weight)
    for linear in (layer.attention.self.value, layer.attention.output.dense):
        nn.init.eye_(linear.weight)
    for norm in (layer.attention.output.LayerNorm, layer.output.LayerNorm):
        nn.init.ones_(norm.weight)
    model.embeddings = nn.Identity()  # so that the embeddings below are the layer's input
    model.embeddings.forward = lambda inputs_embeds=None, **_: inputs_embeds
    X = torch.tensor([[[3.0, 1.0], [1.0, 5.0]]], dtype=torch.float64)
    san = pretrained.trace(model, X, skip=False, mlp=False).hidden[1]
    skip = pretrained.trace(model, X, mlp=False).hidden[1]
    # mean of the tokens (2, 3) -> (-1, 1) for both; with the skip (5, 4) -> (1, -1) and (3, 8) -> (-1, 1)
    torch.testing.assert_close(san[0], torch.tensor([[-1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(skip[0], torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64))


def test_hugging_faces_own_recording_works_inside_an_ablation():
    model, x = small("llama"), inputs("llama")
    with ablate(model, skip=False, mlp=False), torch.no_grad():
        states = model(x, output_hidden_states=True).hidden_states
    trace = pretrained.trace(model, x, skip=False, mlp=False)
    assert torch.equal(states[0], trace.hidden[0])
    assert torch.equal(states[2], trace.hidden[2])


def test_a_hook_of_your_own_sees_the_true_input():
    """The side channel must be first in line, before hooks that were there already."""
    model, x = small("llama"), inputs("llama")
    seen = []
    hook = layers_of(model)[0].input_layernorm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    trace = pretrained.trace(model, x, skip=False)
    hook.remove()
    assert torch.equal(seen[0], trace.hidden[0])


def test_gradients_flow_through_an_ablated_model():
    model, x = small("bert"), inputs("bert")
    with ablate(model, skip=False, mlp=False):
        model(x).last_hidden_state[0, 0, 0].backward()
    assert layers_of(model)[0].attention.self.query.weight.grad.abs().max() > 0
    assert model.embeddings.word_embeddings.weight.grad.abs().max() > 0
    assert layers_of(model)[0].output.dense.weight.grad is None


def test_an_instance_that_had_its_own_forward_gets_it_back():
    """As accelerate leaves it when a model is spread over devices."""
    model, x = small("llama"), inputs("llama")
    layer = layers_of(model)[1]
    original, calls = layer.forward, []

    def mine(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = mine
    pretrained.trace(model, x, skip=False)
    assert layer.forward is mine
    assert len(calls) == 1


def test_unsupported_models_are_refused_with_the_list(plain_types):
    config = hf.GPTNeoXConfig(
        vocab_size=7, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    with pytest.raises(ValueError, match=r"'gpt_neox', which is not supported; supported: albert, bert"):
        family_of(hf.GPTNeoXModel(config))
    with pytest.raises(TypeError, match="Hugging Face model, but is a Linear"):
        family_of(nn.Linear(2, 2))
    crossing = hf.BertConfig(**COMMON, is_decoder=True, add_cross_attention=True)
    with pytest.raises(ValueError, match="cross-attention"), ablate(hf.BertModel(crossing), skip=False):
        pass


def test_bad_switches_are_refused(plain_types):
    model = small("bert")
    with pytest.raises(TypeError, match=r"skip must be True or False, but is int 0"), ablate(model, skip=0):
        pass
    with (
        pytest.raises(TypeError, match="mlp must be True or False, but is NoneType"),
        ablate(model, mlp=None),
    ):
        pass


def test_an_unknown_layout_is_named(plain_types):
    model = small("vit")
    model.blocks = model.layers
    del model.layers
    with pytest.raises(ValueError, match=r"ViTModel of transformers .* has no layers at 'layers"):
        layers_of(model)


def test_every_supported_family_is_tested():
    assert sorted(set(CONFIGS) - {"albert-groups"}) == ablation.supported()
    assert [family.pre_norm for family in ablation.FAMILIES] == [False] * 4 + [True] * 3
