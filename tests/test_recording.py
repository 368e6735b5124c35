"""Tracing: what the hooks see, which inputs are read, and what is left as it was."""

import pytest
import torch
import transformers as hf

from rc_lib import corpus, pretrained
from tests.test_ablation import CAUSAL, CONFIGS, DEPTH, DIM, HEADS, VOCABULARY, inputs, small


@pytest.fixture(scope="module")
def minilm():
    return pretrained.load("minilm")


@pytest.mark.parametrize("name", CONFIGS)
def test_norm_statistics_and_mlp_outputs(name):
    """The frozen statistics reproduce each norm's own output; in order of use, attention's first."""
    model, x = small(name), inputs(name)
    trace = pretrained.trace(model, x)
    depth = len(trace.attention)
    assert [len(stats) for stats in trace.norms] == [2] * depth
    assert len(trace.mlp_out) == depth
    # Llama's family normalises in float32: eps 1.2e-7 on values of order one.
    tol = (
        {"rtol": 1e-5, "atol": 1e-5} if name in CAUSAL and name != "gpt2" else {"rtol": 1e-11, "atol": 1e-11}
    )
    for l, ((_, feed_forward), mlp) in enumerate(zip(trace.norms, trace.mlp_out, strict=True)):
        if (
            trace.final_norm is None
        ):  # post-norm: the layer's output is the norm of something; its rows have weight g
            rows = (trace.hidden[l + 1] - feed_forward.bias) / feed_forward.weight
            torch.testing.assert_close(rows.mean(-1), torch.zeros_like(rows[..., 0]), rtol=0, atol=1e-11)
        else:  # pre-norm: what the MLP's norm read is the layer's output minus what the MLP added
            before = trace.hidden[l + 1] - mlp
            std = before.std(-1, keepdim=True, unbiased=False)
            if not feed_forward.centred:
                std = before.square().mean(-1, keepdim=True).sqrt()
            # eps moves the deviation by eps/(2 std) at most
            torch.testing.assert_close(feed_forward.std, std, rtol=1e-5, atol=1e-5)
    if trace.final_norm is not None:
        torch.testing.assert_close(trace.final_norm.apply(trace.hidden[-1]), trace.output, **tol)
    without = pretrained.trace(model, x, mlp=False)
    assert [len(stats) for stats in without.norms] == [1] * depth
    assert without.mlp_out is None
    assert not without.stacked().requires_grad


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert", "xlnet"])
def test_the_attention_norm_of_a_san_layer_maps_attention_to_the_output(name):
    """SAN: hidden[l+1] = LN(Σ_h P_h X W_h + b); the frozen LN is linear, so it keeps differences of rows."""
    trace = pretrained.trace(small(name), inputs(name), skip=False, mlp=False)
    for l, (stats,) in enumerate(trace.norms):
        back = (trace.hidden[l + 1] - stats.bias) / stats.weight * stats.std + stats.mean
        torch.testing.assert_close(stats.apply(back), trace.hidden[l + 1], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(back.mean(-1, keepdim=True), stats.mean, rtol=1e-9, atol=1e-9)


def test_hidden_states_hold_no_final_norm():
    model, x = small("llama"), inputs("llama")
    trace = pretrained.trace(model, x)
    assert len(trace.hidden) == DEPTH + 1
    torch.testing.assert_close(model.norm(trace.hidden[-1]).detach(), trace.output)
    assert (trace.output - trace.hidden[-1]).abs().max() > 1e-2


def test_all_kinds_of_inputs_agree(minilm):
    text = "All kinds of inputs are read."
    ids = corpus.encode(text)
    expected = pretrained.trace(minilm, text).output
    embedded = minilm.embeddings.word_embeddings(ids).detach()
    for same in (ids, ids[0], [text], {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        torch.testing.assert_close(pretrained.trace(minilm, same).output, expected, rtol=1e-4, atol=1e-5)
    for same in (embedded, embedded[0].double()):
        torch.testing.assert_close(pretrained.trace(minilm, same).output, expected, rtol=1e-4, atol=1e-5)
    encoding = hf.BatchEncoding({"input_ids": ids})
    torch.testing.assert_close(pretrained.trace(minilm, encoding).output, expected)


def test_padding_is_masked():
    model, ids = small("bert"), inputs("bert")[:1]
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = (torch.arange(11) < 7).long()[None]
    alone = pretrained.trace(model, ids, skip=False)
    trace = pretrained.trace(model, {"input_ids": padded, "attention_mask": mask}, skip=False)
    torch.testing.assert_close(trace.output[:, :7], alone.output, rtol=1e-11, atol=1e-11)
    assert trace.attention[0][..., 7:].max() == 0


def test_other_attention_implementations_are_traced_and_kept():
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(CONFIGS["bert"], attn_implementation="sdpa")
    trace = pretrained.trace(model, inputs("bert"))
    assert trace.attention[0].shape == (2, HEADS, 7, 7)
    assert model.config._attn_implementation == "sdpa"
    assert model.training == hf.AutoModel.from_config(CONFIGS["bert"]).training


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            torch.tensor([[1, VOCABULARY]]),
            ValueError,
            "must be from 0 to 52 for this model, but run from 1 to 53",
        ),
        (torch.tensor([[-1, 2]]), ValueError, "but run from -1 to 2"),
        (torch.zeros(1, 24, dtype=torch.long), ValueError, "positions for 23 tokens, but the rows have 24"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, "inputs must not be empty"),
        (
            torch.zeros(1, 2, 3, dtype=torch.long),
            ValueError,
            r"shape \[n\] or \[b, n\], but are a int64 tensor",
        ),
        (torch.full((2, DIM), float("nan")), ValueError, r"inputs\[0, 0\] is nan"),
        (torch.zeros(1, 1, 1, 1, 1), ValueError, "embeddings must have shape"),
        (torch.zeros(2, DIM + 1), ValueError, rf"shape \[b, n, {DIM}\], but are a float"),
        (torch.zeros(3, dtype=torch.bool), TypeError, "token ids must be integers, embeddings floats"),
        ({"input_ids": [[1, 2]]}, TypeError, "a dictionary of tensors"),
        (None, TypeError, "inputs must be a text, token ids"),
        ([], TypeError, "inputs must be a text, token ids"),
        ({}, ValueError, "inputs must not be empty"),
    ],
)
def test_bad_inputs_are_refused(plain_types, wrong, error, message):
    with pytest.raises(error, match=message):
        pretrained.trace(small("bert"), wrong)


def test_roberta_counts_positions_after_the_padding_id(plain_types):
    model = small("roberta")  # 23 positions, padding id 1
    pretrained.trace(model, torch.full((1, 21), 5))
    with pytest.raises(ValueError, match="positions for 21 tokens, but the rows have 22"):
        pretrained.trace(model, torch.full((1, 22), 5))
