"""Tiny targets on disk, dataset folders and training configs, shared by the training tests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dspine_jax.checkpoint_io import module_to_tensors
from dspine_jax.config import (
    AnchorConfig,
    ConvolutionConfig,
    DataConfig,
    DrafterConfig,
    GRUConfig,
    InjectionConfig,
    LogConfig,
    MarkovConfig,
    MeshConfig,
    OptimizerConfig,
    SelectorConfig,
    TargetConfig,
    TrainConfig,
)
from dspine_jax.sharding import batch_sharding, make_mesh, tree_shardings
from dspine_jax.target import Target
from dspine_jax.transfer import build_transfer_space
from train.data import Manifest, write_dataset
from train.step import TrainState, abstract_state, initial_state, make_train_step

METHODS = ("dflash", "dspine")
# Tiny parts of the other methods, by the names that tests call them.
RIVALS = {
    "dflash2": {"convolution": ConvolutionConfig(taps=2, group_size=8), "selector": SelectorConfig(rank=8, num_candidates=4)},
    "dspark": {"markov": MarkovConfig("vanilla", 8), "confidence": True, "confidence_with_markov": True, "label_shift": "shifted"},
    "dspark gated": {"markov": MarkovConfig("gated", 8), "confidence": True, "label_shift": "shifted"},
    "dspark rnn": {"markov": MarkovConfig("rnn", 8), "label_shift": "shifted"},
    "domino": {"gru": GRUConfig(hidden_size=12, projection_size=8), "label_shift": "shifted"},
    "domino same position": {"gru": GRUConfig(hidden_size=12, projection_size=8)},
}
MASK_ID = 3
WIDTH = 24
TARGET = TargetConfig(
    family="qwen3",
    vocab_size=128,
    num_tokens=120,  # eight padded rows
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
)


def randomise(module: nnx.Module, seed: int) -> None:
    """Norm weights in [0.5, 1.5] (with ones a missing norm would not show), everything else N(0, 0.15)."""
    rng = np.random.default_rng(seed)
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        shape = variable.get_value().shape
        values = rng.uniform(0.5, 1.5, shape) if path[-1] == "weight" else 0.15 * rng.normal(size=shape)
        variable.set_value(jnp.asarray(values, jnp.float32))


def tiny_target(**changes) -> Target:
    """Random fp32 target."""
    target = Target(dataclasses.replace(TARGET, **changes), rngs=nnx.Rngs(0))
    randomise(target, 1)
    return target


def write_target(folder: Path) -> Path:
    """``tiny_target()`` as a Hugging Face folder."""
    folder.mkdir(parents=True)
    names = {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "intermediate_size": "intermediate_size", "rope_theta": "rope_theta",
        "rms_norm_eps": "rms_norm_eps", "tie_word_embeddings": "tie_embeddings", "max_position_embeddings": "max_position_embeddings",
    }  # fmt: skip
    content = {"model_type": "qwen3", "eos_token_id": 2} | {theirs: getattr(TARGET, ours) for theirs, ours in names.items()}
    (folder / "config.json").write_text(json.dumps(content))
    # The usable vocabulary is what the tokenizer can give.
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(TARGET.num_tokens)}}}))
    tensors = module_to_tensors(tiny_target())
    save_file({name if name.startswith("lm_head.") else f"model.{name}": x for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> Path:
    """A real tokenizer of 120 words in ``folder``: "w7" to "w119" are their own ids; 2 ends a text and "<mask>" is ``MASK_ID``. It has a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<unk>", "<end>", "<mask>", "<user>", "<turn>", "<assistant>"]
    words = names + [f"w{i}" for i in range(len(names), TARGET.num_tokens)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <turn> {% endfor %}{% if add_generation_prompt %}<assistant>"
    template += "{% if enable_thinking is defined and not enable_thinking %} w119 w119{% endif %}{% endif %}"
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def rows(count: int, width: int = WIDTH, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random rows of unequal lengths: (tokens int32 [n,S], loss mask bool [n,S], lengths int32 [n])."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(width // 2, width + 1, count).astype(np.int32)
    inside = np.arange(width)[None] < lengths[:, None]
    tokens = np.where(inside, rng.integers(MASK_ID + 1, TARGET.num_tokens, (count, width)), 0).astype(np.int32)
    return tokens, inside & (np.arange(width)[None] >= rng.integers(2, 6, count)[:, None]), lengths


def prompts(lengths) -> list[list[int]]:
    """Random prompts of these lengths, without special tokens."""
    rng = np.random.default_rng(0)
    return [[int(t) for t in rng.integers(MASK_ID + 1, TARGET.num_tokens, n)] for n in lengths]


def write_data(folder: Path, count: int = 13) -> Path:
    """Dataset folder of ``rows(count)``."""
    write_dataset(folder, *rows(count), Manifest(name="tiny", source="random"))
    return folder


def train_config(method: str, *, injection: dict | None = None, drafter: dict | None = None, optimizer: dict | None = None, **changes) -> TrainConfig:
    """fp32 config of a two-layer drafter for the tiny target (sizes not resolved)."""
    injected = InjectionConfig(**{"transfer_size": 16, "num_candidates": 4} | (injection or {})) if method == "dspine" else None
    sizes = {"mask_token_id": MASK_ID, "block_size": 4, "num_layers": 2, "target_layer_ids": (0, 1), "injection": injected} | RIVALS.get(method, {})
    fields = {
        "drafter": DrafterConfig(**sizes | (drafter or {})),
        "compute_dtype": "float32",
        "steps": 10,
        "data": DataConfig(batch_size=8),
        "anchors": AnchorConfig(num_anchors=4),
        "log": LogConfig(every=1),
        "optimizer": OptimizerConfig(**{"learning_rate": 1e-2, "warmup_fraction": 0.2} | (optimizer or {})),
    }
    return TrainConfig(**fields | changes)


def resolved(config: TrainConfig, target: TargetConfig = TARGET) -> TrainConfig:
    """The config as the trainer uses it."""
    return dataclasses.replace(config, drafter=config.drafter.resolve(target))


@dataclasses.dataclass
class Setup:
    """A training step ready to be called on a mesh: ``step(state, target_state, batch)``."""

    config: TrainConfig
    mesh: jax.sharding.Mesh
    target: Target
    target_state: nnx.State
    graphdef: nnx.GraphDef
    state: TrainState
    step: object

    def batch(self, tokens: np.ndarray, loss_mask: np.ndarray) -> dict[str, jax.Array]:
        return jax.device_put({"tokens": tokens, "loss_mask": loss_mask}, batch_sharding(self.mesh))


def setup(config: TrainConfig, devices: int | list[jax.Device] = 1, target: Target | None = None) -> Setup:
    """State in its planned layout (transfer space filled) and the jitted step, as the trainer builds them."""
    target = tiny_target() if target is None else target
    config = resolved(config, target.config)
    mesh = make_mesh(config.mesh, jax.devices()[:devices] if isinstance(devices, int) else devices)
    host = _host_state(config, target)
    with jax.set_mesh(mesh):
        target_graph, target_state = nnx.split(target)
        target_state = jax.device_put(target_state, tree_shardings(target_state, mesh))
        graphdef, abstract = abstract_state(config)
        state = jax.device_put(host, tree_shardings(abstract, mesh))
        target = nnx.merge(target_graph, target_state)
        return Setup(config, mesh, target, target_state, graphdef, state, make_train_step(config, mesh, graphdef, target))


_STATES: dict = {}


def _host_state(config: TrainConfig, target: Target) -> TrainState:
    """Initial state in host memory; kept, because compiling the random draws takes seconds."""
    key = (config.drafter, config.seed, config.optimizer.ema_decay > 0)
    if key not in _STATES:
        state = initial_state(config, make_mesh(MeshConfig(), jax.devices()[:1]))
        if config.drafter.injection is not None:
            state = dataclasses.replace(state, frozen=transfer_of(config, target, state.frozen))
        _STATES[key] = jax.device_get(state)
    return _STATES[key]


def transfer_of(config: TrainConfig, target: Target, like: nnx.State) -> nnx.State:
    """The transfer space of the target, as host arrays in the structure of ``like``."""
    injection, rows_VD = config.drafter.injection, np.asarray(jax.device_get(target.output_embedding_VD))
    counts = np.random.default_rng(5).integers(0, 50, len(rows_VD))
    mean, basis = build_transfer_space(rows_VD, counts, injection.transfer_size, whiten=injection.whiten, num_tokens=target.config.num_tokens)
    values = {"mean": mean, "basis": basis}
    return nnx.from_flat_state([(path, x.replace(values[path[-1]])) for path, x in nnx.to_flat_state(like)])


def fingerprints(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def relative_l2(ours, theirs) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-30))


def assert_bit_equal(ours, theirs) -> None:
    """Same tree, dtypes and bits."""
    ours, theirs = (jax.tree_util.tree_leaves_with_path(tree) for tree in (ours, theirs))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs):
        a, b = np.asarray(jax.device_get(a)), np.asarray(jax.device_get(b))
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)
