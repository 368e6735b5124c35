"""Float64 passes with narrow weights: the same numbers as a widened model, and weights left bit for bit."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from rc_lib import pretrained, recording
from rc_lib.float64 import in_float64, release_memory
from tests.test_ablation import inputs, small


def output(model, x):
    return recording.run(model, recording.as_batch(model, x))


@pytest.mark.parametrize("name", ["bert", "albert", "distilbert", "llama", "qwen2", "gpt2", "vit"])
def test_one_module_at_a_time_is_the_whole_model_widened(name):
    narrow, x = small(name, torch.float32), inputs(name)
    wide = copy.deepcopy(narrow).double()
    x = x.float() if x.is_floating_point() else x
    with in_float64(narrow):
        ours = output(narrow, x)
    with in_float64(wide):
        theirs = output(wide, x.double() if x.is_floating_point() else x)
    assert ours.dtype == torch.float64
    # The same products, but rotary angles and masks may have been made in the narrow format.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    if name not in ("llama", "qwen2"):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_casts_to_float32_are_lifted():
    """Llama normalises and takes its softmax in float32, whatever the weights: 1e-7 wrong, here 1e-15."""
    model, x = small("llama"), inputs("llama")
    plain = pretrained.trace(model, x)
    with in_float64(model):
        wide = pretrained.trace(model, x)
    error = [(t.final_norm.apply(t.hidden[-1]) - t.output).abs().max().item() for t in (plain, wide)]
    assert error[0] > 1e-9 > 1e-13 > error[1]
    rows = [(t.attention[0].sum(-1) - 1).abs().max().item() for t in (plain, wide)]
    assert rows[0] > 1e-9 > 1e-14 > rows[1]


def test_weights_come_back_bit_for_bit_even_after_an_error():
    model = small("bert", torch.float32)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    with in_float64(model):
        output(model, inputs("bert"))
    handle = model.encoder.layer[1].output.dense.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), in_float64(model):
        output(model, inputs("bert"))
    handle.remove()
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0], name
        assert torch.equal(p, before[name][1])
    assert output(model, inputs("bert")).dtype == torch.float32


def test_at_most_one_modules_weights_are_wide_at_a_time():
    model, most = small("llama", torch.float32), []
    watch = [
        m.register_forward_pre_hook(
            lambda *_: most.append(sum(p.numel() for p in model.parameters() if p.dtype == torch.float64))
        )
        for m in model.modules()
        if isinstance(m, nn.Linear)
    ]
    with in_float64(model):
        output(model, inputs("llama"))
    for handle in watch:
        handle.remove()
    assert 0 < max(most) <= max(p.numel() for p in model.parameters())


def test_bad_input(plain_types):
    with pytest.raises(TypeError, match="must be a torch"), in_float64("bert"):
        pass


def test_a_deleted_models_memory_is_given_back():
    """Ten thousand blocks below glibc's limit for pages of their own would stay with the process."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs Linux's count of resident pages")
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1])  # noqa: E731
    blocks = [torch.ones(5_000) for _ in range(10_000)]  # 200 MB
    held = resident()
    blocks.append(blocks)  # a cycle, as modules and hooks make them
    del blocks
    release_memory()
    assert resident() < held - 25_000  # pages of 4 kB: half of it
