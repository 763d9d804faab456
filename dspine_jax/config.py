"""Frozen configuration dataclasses, with the checks that need no weights.

``None`` in a size field means "as the target"; ``DrafterConfig.resolve`` replaces every such
None, and only resolved configs are saved and used to build models.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Literal

# Optional parts of a drafter and the method each makes of DFlash.
PART_OF = {"injection": "dspine", "convolution": "dflash2", "selector": "dflash2", "markov": "dspark", "confidence": "dspark", "gru": "domino"}
METHODS = ("dflash", *dict.fromkeys(PART_OF.values()))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class TargetConfig:
    """Architecture of a target, read from its own files. Raises ValueError on impossible sizes."""

    family: Literal["qwen3", "llama"]
    vocab_size: int  # rows of the embedding table, padding included
    num_tokens: int  # usable rows; columns beyond are masked out of every choice and loss
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    max_position_embeddings: int = 2048

    def __post_init__(self):
        _require(self.num_heads % self.num_kv_heads == 0, f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        _require(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd; rotary embedding pairs its halves")
        _require(0 < self.num_tokens <= self.vocab_size, f"num_tokens {self.num_tokens} must lie in 1..{self.vocab_size} (vocab_size)")
        _require(self.rope_theta > 0, f"rope_theta {self.rope_theta} must be positive")

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises queries and keys per head, Llama does not."""
        return self.family == "qwen3"


@dataclass(frozen=True)
class InjectionConfig:
    """DSpine's injection and predecessor-conditioned decoding (DESIGN 5)."""

    layers: tuple[int, ...] | None = None  # draft layers after which to inject; None = all
    transfer_size: int = 192  # R, width of the transfer space
    whiten: bool = True  # divide the basis by sqrt(eigenvalue + eps)
    message_init_std: float = 0.01  # 0 starts training exactly at block-causal DFlash
    num_candidates: int = 8  # P, candidates of a slot in the transition table (a power of two)

    def __post_init__(self):
        P = self.num_candidates
        _require(P > 0 and P & (P - 1) == 0, f"injection.num_candidates {P} is not a power of two")
        _require(self.transfer_size > 0, f"injection.transfer_size {self.transfer_size} must be positive")


@dataclass(frozen=True)
class ConvolutionConfig:
    """DFlash2's grouped dynamic convolution around every sublayer."""

    taps: int = 2  # slots a filter sees: its own and those just before it
    group_size: int = 16  # channels that share a computed weight

    def __post_init__(self):
        _require(self.taps > 0, f"convolution.taps {self.taps} must be positive")
        _require(self.group_size > 0, f"convolution.group_size {self.group_size} must be positive")


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash2's candidate selector."""

    rank: int = 256  # R, width of the codebooks
    num_candidates: int = 16  # P, candidates of a draft (a power of two)

    def __post_init__(self):
        P = self.num_candidates
        _require(P > 0 and P & (P - 1) == 0, f"selector.num_candidates {P} is not a power of two")
        _require(self.rank > 0, f"selector.rank {self.rank} must be positive; without a selector set drafter.selector to None")


@dataclass(frozen=True)
class MarkovConfig:
    """DSpark's Markov head."""

    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    rank: int = 256  # R, width of the token embeddings and codes

    def __post_init__(self):
        _require(self.rank > 0, f"markov.rank {self.rank} must be positive; without a Markov head set drafter.markov to None")


@dataclass(frozen=True)
class GRUConfig:
    """Domino's head."""

    hidden_size: int = 1024  # G, width of the GRU over the tokens decided so far
    projection_size: int = 256  # E, width of the codes

    def __post_init__(self):
        for name in ("hidden_size", "projection_size"):
            _require(getattr(self, name) > 0, f"gru.{name} {getattr(self, name)} must be positive")


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter, or with the parts of at most one other method: ``injection`` DSpine, ``convolution`` and ``selector`` DFlash2,
    ``markov`` and ``confidence`` DSpark, ``gru`` Domino."""

    mask_token_id: int | None = None  # required: the token whose embedding fills undecided slots
    block_size: int = 16  # K, the anchor slot included
    num_layers: int = 5
    target_layer_ids: tuple[int, ...] | None = None
    block_attention: Literal["bidirectional", "causal"] | None = None  # None: causal with injection, else bidirectional
    injection: InjectionConfig | None = None
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None
    markov: MarkovConfig | None = None
    confidence: bool = False  # a head that says how likely a draft is accepted
    confidence_with_markov: bool = False  # which also reads the Markov embedding of the token before
    gru: GRUConfig | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float | None = None
    rms_norm_eps: float | None = None
    hidden_size: int | None = None  # must equal the target's
    vocab_size: int | None = None  # must equal the target's rows
    num_target_layers: int | None = None  # must equal the target's
    # Slot k predicts the token at anchor + k (slot 0 none: K - 1 drafts), or, shifted, at anchor + k + 1 (K drafts).
    label_shift: Literal["same_position", "shifted"] = "same_position"
    template_mode: Literal["thinking", "non-thinking", "unset"] | None = None  # chat template mode of the training data; None: as the data say

    def __post_init__(self):
        _require(self.block_size >= 2, f"drafter.block_size {self.block_size} leaves no draft; it counts the anchor slot, use at least 2")
        _require(self.num_layers >= 1, f"drafter.num_layers {self.num_layers} must be at least 1")
        parts = [f"drafter.{part}" for part in PART_OF if getattr(self, part)]
        strangers = [name for name in parts if PART_OF[name.removeprefix("drafter.")] != self.method]
        _require(not strangers, f"{' and '.join([*parts[:1], *strangers])} are set together, but belong to different methods; a drafter has the parts of one")
        if self.confidence_with_markov:
            _require(self.confidence, "drafter.confidence_with_markov is set but drafter.confidence is not: there is no head that could read it")
            _require(self.markov is not None, "drafter.confidence_with_markov is set but drafter.markov is None: there is no Markov embedding to read")
        if self.injection is not None:
            _require(self.label_shift == "same_position", "drafter.injection needs drafter.label_shift 'same_position': slot 1 is conditioned on the anchor")
            _require(self.block_attention != "bidirectional", "drafter.injection needs block_attention 'causal': an injected slot may not see later slots")
            for layer in self.injection.layers or ():
                _require(0 <= layer < self.num_layers, f"drafter.injection.layers: {layer} is outside 0..{self.num_layers - 1}")
            layers = self.injection.layers
            _require(layers is None or list(layers) == sorted(set(layers)), f"drafter.injection.layers {layers} must be increasing without repeats")
            _require(layers is None or len(layers) > 0, "drafter.injection.layers is empty; set drafter.injection to None for DFlash")

    @property
    def method(self) -> str:
        """One of METHODS."""
        return next((method for part, method in PART_OF.items() if getattr(self, part)), "dflash")

    @property
    def first_slot(self) -> int:
        """The first slot that predicts; draft j comes from slot first_slot + j."""
        return int(self.label_shift == "same_position")

    @property
    def num_predicting_slots(self) -> int:
        """J, trained slots of a block: first_slot..K-1."""
        return self.block_size - self.first_slot

    @property
    def num_draft_tokens(self) -> int:
        """Proposals per round. Domino trains its last slot in either layout, but drafts K - 1."""
        return self.block_size - 1 if self.gru is not None else self.num_predicting_slots

    @property
    def injection_layers(self) -> tuple[int, ...]:
        """Draft layers after which the injection runs (empty for DFlash)."""
        if self.injection is None:
            return ()
        return tuple(range(self.num_layers)) if self.injection.layers is None else self.injection.layers

    @property
    def policies(self) -> tuple[str, ...]:
        """Lossless policies this drafter can serve at temperature > 0 (docs/lossless.md)."""
        return ("own", "tail_mixed", "point_mass") if self.scores_pairs else ("own", "point_mass")

    @property
    def scores_pairs(self) -> bool:
        """Whether drafts are chosen by a table of scores over pairs of neighbouring candidates."""
        return self.redoes_last_write or self.selector is not None

    @property
    def redoes_last_write(self) -> bool:
        """Predecessor-conditioned decoding exists only where the last layer injects."""
        return self.num_layers - 1 in self.injection_layers

    def resolve(self, target: TargetConfig) -> DrafterConfig:
        """Fill every size left None from the target and check the whole against it.

        Raises ValueError when the mask id is missing, out of the table or an end id, when taps are
        bad, or when sizes that must equal the target's do not.
        """
        for name, theirs in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size), ("num_target_layers", target.num_layers)):
            ours = getattr(self, name)
            _require(ours in (None, theirs), f"drafter.{name} is {ours} but the target has {theirs}: this drafter belongs to another target")
        mask = self.mask_token_id
        _require(mask is not None, "drafter.mask_token_id is not set; give the id of a token that never occurs in the text (see docs/decisions.md)")
        _require(0 <= mask < target.vocab_size, f"drafter.mask_token_id {mask} is outside the target's table of {target.vocab_size} rows")
        _require(mask not in target.eos_token_ids, f"drafter.mask_token_id {mask} is an end token of the target {target.eos_token_ids}; choose an unused id")
        ids = self.target_layer_ids
        ids = default_target_layer_ids(target.num_layers) if ids is None else tuple(ids)
        check_target_layer_ids(ids, target.num_layers)
        _require(len(ids) > 0, "drafter.target_layer_ids is empty; a drafter reads at least one target layer")
        filled = {}
        for name in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "rope_theta", "rms_norm_eps", "hidden_size", "vocab_size"):
            value = getattr(self, name)
            filled[name] = getattr(target, name) if value is None else value
        heads, kv_heads = filled["num_heads"], filled["num_kv_heads"]
        _require(heads % kv_heads == 0, f"drafter.num_heads {heads} is not a multiple of drafter.num_kv_heads {kv_heads}")
        _require(filled["head_dim"] % 2 == 0, f"drafter.head_dim {filled['head_dim']} is odd; rotary embedding pairs its halves")
        injection = self.injection
        if injection is not None:
            R = injection.transfer_size
            _require(R <= target.hidden_size, f"drafter.injection.transfer_size {R} exceeds the target's width {target.hidden_size}")
            injection = dataclasses.replace(injection, layers=self.injection_layers)
        if self.convolution is not None:
            size, group = filled["hidden_size"], self.convolution.group_size
            _require(size % group == 0, f"drafter.convolution.group_size {group} does not divide the target's width {size}")
        attention = self.block_attention or ("bidirectional" if injection is None else "causal")
        return dataclasses.replace(
            self, **filled, num_target_layers=target.num_layers, target_layer_ids=ids, injection=injection, block_attention=attention
        )


@dataclass(frozen=True)
class DataConfig:
    """Training rows: a dataset folder (docs/data.md) and how it is read."""

    path: str = ""
    batch_size: int = 32  # rows of a global step, all devices together
    max_length: int | None = None  # cut rows to this many tokens; None: the folder's width
    num_workers: int = 0  # grain worker processes; 0 reads in the main process


@dataclass(frozen=True)
class AnchorConfig:
    """Which positions become blocks in a step, drawn afresh each time."""

    num_anchors: int = 48  # N blocks of a row
    replacement: bool = False  # draw with replacement: short answers still fill all N blocks


@dataclass(frozen=True)
class LossConfig:
    """Loss of DESIGN 5.6 and BASELINES 3; DFlash uses only the cross-entropy of its single path.

    The main path is that of the corrected, conditioned or only logits, whichever the drafter drafts from.
    """

    loss_decay_gamma: float = 7.0  # draft j = 0.. weighs exp(-j/gamma) in every term
    dpace_alpha: float | None = None  # set: D-PACE weights of this alpha (0.5 in its paper) take the place of exp(-j/gamma)
    ce_weight: float = 1.0  # cross-entropy of the main path
    l1_weight: float = 0.0  # L1 distance of the main path's law from the target's; a total variation (half of it) of weight w is l1_weight w/2
    base_weight: float = 0.5  # DSpine, beta: cross-entropy of the base logits beside the conditioned ones
    feature_weight: float = 0.5  # DSpine, lambda: cosine loss of predicted features, mean over injected layers
    selector_weight: float = 1.0  # DFlash2: cross-entropy of the selector among the candidates
    confidence_weight: float = 1.0  # DSpark: binary cross-entropy of the confidence
    base_decay_fraction: float = 1.0  # Domino: the weight of the base logits' cross-entropy falls from 1 to 0 over this share of the steps
    vocab_chunk: int = 64  # slots of a row whose [.., V] logits exist at one time
    prefix_mask: bool = False  # a slot counts only where every earlier slot of its block does

    def __post_init__(self):
        _require(self.loss_decay_gamma > 0, f"loss.loss_decay_gamma {self.loss_decay_gamma} must be positive")
        alpha = self.dpace_alpha
        _require(alpha is None or 0 <= alpha < 1, f"loss.dpace_alpha {alpha} must lie in [0, 1); None keeps the decay of loss.loss_decay_gamma")
        _require(self.vocab_chunk > 0, f"loss.vocab_chunk {self.vocab_chunk} must be positive")
        _require(0 < self.base_decay_fraction <= 1, f"loss.base_decay_fraction {self.base_decay_fraction} must lie in (0, 1]")
        for name in ("ce_weight", "l1_weight", "selector_weight", "confidence_weight"):
            _require(getattr(self, name) >= 0, f"loss.{name} {getattr(self, name)} must not be negative")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on fp32 masters, linear warm-up then cosine to ``final_fraction`` of the peak."""

    learning_rate: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    warmup_fraction: float = 0.04
    final_fraction: float = 0.0
    clip_norm: float = 1.0
    ema_decay: float = 0.0  # d > 0: the mean of the weights after every update, falling by d an update into the past, is exported; 0 exports the last
    on_nonfinite: Literal["skip", "stop"] = "skip"  # a non-finite loss or gradient never changes the state
    max_consecutive_skips: int = 20  # skipping this many steps in a row stops the run

    def __post_init__(self):
        _require(self.learning_rate > 0, f"optimizer.learning_rate {self.learning_rate} must be positive")
        _require(self.clip_norm > 0, f"optimizer.clip_norm {self.clip_norm} must be positive; a large value switches clipping off")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay {self.weight_decay} must not be negative")
        _require(self.max_consecutive_skips >= 1, f"optimizer.max_consecutive_skips {self.max_consecutive_skips} must be at least 1")
        for name in ("beta1", "beta2", "ema_decay"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name} {getattr(self, name)} must lie in [0, 1)")
        for name in ("warmup_fraction", "final_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"optimizer.{name} {getattr(self, name)} must lie in [0, 1]")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class CheckpointConfig:
    """Orbax checkpoints in ``workdir/checkpoints``."""

    every: int = 500  # steps between saves; the last step is always saved
    keep: int = 2


@dataclass(frozen=True)
class LogConfig:
    """TensorBoard and metrics.jsonl in ``workdir``."""

    every: int = 20


@dataclass(frozen=True)
class KernelConfig:
    """Implementation of each operation of ``pallas_kernels``; None is its default, the fastest that serves. Numbers differ by rounding alone.

    A name must be among the operation's ``IMPLEMENTATIONS`` (else ValueError); one that cannot run raises NotImplementedError where the operation is
    called. A choice for an operation that a drafter does not call has no effect.
    """

    injection: str | None = None
    block_attention: str | None = None
    topk_logits: str | None = None  # LM head with top-P: in decoding, and in DFlash2's training
    head_softmax: str | None = None  # vocabulary pass of cross_entropy: in training alone
    transition: str | None = None  # table of the transition cache: in decoding alone
    cached_attention: str | None = None  # the target's attention to its cache: in decoding alone

    def __post_init__(self):
        for name, value in self.chosen.items():
            known = importlib.import_module(f"pallas_kernels.{name}").IMPLEMENTATIONS  # imports JAX, so only where something is chosen
            _require(value in known, f"kernels.{name} {value!r} is none of {', '.join(map(repr, known))}; None is the default")

    @property
    def chosen(self) -> dict[str, str]:
        """The explicit choices, by operation."""
        return {f.name: value for f in dataclasses.fields(self) if (value := getattr(self, f.name)) is not None}

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Raise ValueError where one of these operations is chosen, since a choice that nothing reads would pass unseen."""
        for name in names:
            _require(name not in self.chosen, f"kernels.{name} is {getattr(self, name)!r}, but {why}; leave it out")


DEFAULT_KERNELS = KernelConfig()


@dataclass(frozen=True)
class TrainConfig:
    """Everything a training run depends on; saved resolved beside its checkpoints."""

    workdir: str = ""
    target: str = ""  # HF folder or GGUF file
    init_from: str | None = None  # drafter folder whose weights training starts from; the optimizer starts anew
    steps: int = 1000
    epochs: int | None = None  # set: so many passes over the data decide the steps, whatever ``steps`` says
    seed: int = 0
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: bool = False  # recompute draft layers in the backward pass instead of keeping activations
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    anchors: AnchorConfig = field(default_factory=AnchorConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)

    def __post_init__(self):
        self.kernels.refuse(("transition", "cached_attention"), "training never calls it: choose it with --kernel where text is decoded")
        _require(self.init_from != "", "init_from is empty; give a drafter folder, or init_from=none to start from random weights")
        for name, value in (
            ("steps", self.steps),
            ("epochs", 1 if self.epochs is None else self.epochs),
            ("data.batch_size", self.data.batch_size),
            ("anchors.num_anchors", self.anchors.num_anchors),
            ("checkpoint.every", self.checkpoint.every),
            ("checkpoint.keep", self.checkpoint.keep),
            ("log.every", self.log.every),
        ):
            _require(value >= 1, f"{name} is {value}; it must be at least 1")


def check_target_layer_ids(ids: tuple[int, ...], num_layers: int) -> None:
    """Refuse ids that are out of range, not strictly increasing, or the last layer. Raises ValueError."""
    for previous, current in zip((None, *ids), ids):
        if not 0 <= current < num_layers:
            raise ValueError(f"target_layer_ids: id {current} is outside 0..{num_layers - 1} of a target with {num_layers} layers")
        if current == num_layers - 1:
            raise ValueError(
                f"target_layer_ids: id {current} is the last layer; its state before or after the final norm is ambiguous, use ids up to {num_layers - 2}"
            )
        if previous is not None and current <= previous:
            raise ValueError(f"target_layer_ids: id {current} does not come after {previous}; give each id once, in increasing order")


def default_target_layer_ids(num_layers: int, num_taps: int | None = None) -> tuple[int, ...]:
    """round(1 + i*(n-4)/(M-1)), halves to even, M = min(5, n-3) (DESIGN 3). [1,9,17,25,33] for n = 36.

    Raises ValueError when fewer than 4 layers leave no room for the formula or ids would repeat.
    """
    taps = min(5, num_layers - 3) if num_taps is None else num_taps
    if num_layers < 4 or taps < 1:
        raise ValueError(f"a target with {num_layers} layers has no default taps; set drafter.target_layer_ids explicitly")
    ids = (num_layers // 2,) if taps == 1 else tuple(round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps))
    check_target_layer_ids(ids, num_layers)
    return ids
