"""Where models come from: published configurations, packages, folders, and a hub that is not there."""

import warnings

import pytest
import torch
import transformers as hf

from rc_lib import corpus, models, pretrained
from rc_lib.ablation import layers_of
from tests.test_ablation import CONFIGS, inputs, small


@pytest.fixture(scope="module")
def minilm():
    return pretrained.load("minilm")


@pytest.fixture(scope="module")
def albert():
    """The one of the paper's three models that is quick to make: twelve layers share their weights."""
    return pretrained.load("albert-base", trained=False, seed=3)


# Number of parameters as published with each model (without its language-model head, with its pooler).
PARAMETERS = {"bert-base": 108_310_272, "albert-base": 11_683_584, "xlnet-base": 116_718_336}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_configurations_have_the_published_size(name):
    config = models.config_of(name)
    with torch.device("meta"):
        model = hf.AutoModel.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[name]
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (12, 768, 12)
    assert config.initializer_range == 0.02


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("bert-base", "bert-base"),
        ("bert-base-cased", "bert-base"),
        ("google-bert/bert-base-cased", "bert-base"),
        ("albert-base-v2", "albert-base"),
        ("xlnet-base-cased", "xlnet-base"),
        ("bert-base-uncased", None),
        ("minilm", None),
    ],
)
def test_published_names(name, key):
    assert models.published_name(name) == key


def test_random_initialisation_is_fixed_by_its_seed(albert):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    again = pretrained.load("albert-base-v2", trained=False, seed=3)
    other = pretrained.load("albert-base", trained=False, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention.query.weight"
    W = albert.get_parameter(name)
    assert torch.equal(again.get_parameter(name), W)
    assert not torch.equal(other.get_parameter(name), W)
    # 589,824 draws: the standard error of their deviation is 0.02/√(2·589824) = 2e-5
    assert abs(W.std().item() - 0.02) < 1e-4
    assert not again.training


def test_dtype_and_reinitialised_minilm(minilm):
    fresh = pretrained.load("minilm", trained=False, dtype=torch.float64)
    assert fresh.dtype == torch.float64
    assert fresh.config.num_hidden_layers == 6
    assert sum(w.numel() for w in fresh.parameters()) == sum(w.numel() for w in minilm.parameters())
    assert not torch.equal(fresh.pooler.dense.weight.float(), minilm.pooler.dense.weight)


def test_a_folder_of_your_own(tmp_path):
    model = small("distilbert", torch.float32)
    model.save_pretrained(tmp_path)
    loaded = pretrained.load(str(tmp_path))
    x = inputs("distilbert")
    assert torch.equal(pretrained.trace(loaded, x).output, pretrained.trace(model, x).output)
    fresh = pretrained.load(str(tmp_path), trained=False)
    assert not torch.equal(pretrained.trace(fresh, x).output, pretrained.trace(model, x).output)
    decoder = hf.LlamaForCausalLM(CONFIGS["llama"])
    decoder.save_pretrained(tmp_path / "decoder")
    assert isinstance(pretrained.load(str(tmp_path / "decoder")), hf.LlamaForCausalLM)


def test_a_folder_with_a_tokenizer_reads_text(tmp_path):
    tok = hf.PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer("minilm"), pad_token="[PAD]")
    tok.save_pretrained(tmp_path)
    config = hf.DistilBertConfig(vocab_size=30522, dim=6, n_layers=1, n_heads=1, hidden_dim=6)
    hf.DistilBertModel(config).save_pretrained(tmp_path)
    model = pretrained.load(str(tmp_path))
    assert torch.equal(pretrained.tokens(model, "Any text of yours."), corpus.encode("Any text of yours."))
    assert pretrained.trace(model, "Any text of yours.", skip=False).hidden[1].shape == (1, 7, 6)


class NoNetwork:
    """A session that counts its requests and reaches nobody."""

    def __init__(self):
        self.asked = []

    def head(self, url, timeout):
        self.asked.append((url, timeout))
        raise OSError("Name or service not known")


@pytest.mark.parametrize("name", ["bert-base", "nobody/has-this-model"])
def test_trained_weights_without_a_network_fail_at_once_and_clearly(name, monkeypatch, tmp_path):
    """One request, no retries: transformers itself would try for half a minute."""
    session = NoNetwork()
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        pretrained.ModelUnavailable, match="the hub cannot be reached; without a network use"
    ) as info:
        pretrained.load(name)
    assert len(session.asked) == 1
    assert session.asked[0][1] <= 5
    assert "\n" not in str(info.value)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(pretrained.ModelUnavailable, match="is a folder, but holds no usable model"):
        pretrained.load(str(tmp_path))


def test_offline_mode_asks_nobody(monkeypatch):
    session = NoNetwork()
    monkeypatch.setattr("huggingface_hub.get_session", lambda: session)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not models.hub_reachable()
    assert not session.asked


def test_unsupported_family_is_refused_before_its_weights_are_read(tmp_path, plain_types):
    hf.T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"its family must be one of 'albert', 'bert'.*but is str 't5'"):
        pretrained.load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (3, {}, TypeError, "name must be a string, but is int 3"),
        (
            "",
            {},
            ValueError,
            "name must be one of bert-base, albert-base, xlnet-base, minilm, smollm2, a name",
        ),
        ("minilm", {"dtype": torch.int8}, ValueError, "dtype must be one of"),
    ],
)
def test_bad_names_are_refused(plain_types, name, options, error, message):
    with pytest.raises(error, match=message):
        pretrained.load(name, **options)


def test_quiet_leaves_no_trace(capfd):
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    filters = list(warnings.filters)
    with models.quiet():
        assert not logging.is_progress_bar_enabled()
        warnings.warn("not seen", UserWarning, stacklevel=1)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (level, bars)
    assert warnings.filters == filters
    pretrained.load("minilm")
    assert capfd.readouterr() == ("", "")


def test_smollm2s_configuration_is_the_published_one():
    config = models.config_of("smollm2")
    assert (config.num_hidden_layers, config.hidden_size) == (30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads, config.vocab_size) == (9, 3, 49152)
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    assert sum(w.numel() for w in model.parameters()) == 134_515_008
    assert len(layers_of(model)) == 30


def test_rotary_rows_are_put_back_in_order():
    """GGUF stores (first, second) halves interleaved: rows 0 3 1 4 2 5 for one head of six."""
    W = torch.tensor([[0.0], [3], [1], [4], [2], [5]])
    assert models._unpermuted(W, 1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    two = torch.cat([W, W + 6])
    assert models._unpermuted(two, 2).flatten().tolist() == list(range(12))
