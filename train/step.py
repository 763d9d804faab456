"""The jitted training step: anchors, losses, AdamW on fp32 masters, non-finite guard."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspine_jax.anchors import draw_anchors, make_blocks
from dspine_jax.config import OptimizerConfig, TrainConfig
from dspine_jax.drafter import Drafter
from dspine_jax.objective import block_objective
from dspine_jax.sharding import batch_sharding, tree_shardings
from dspine_jax.target import Target
from dspine_jax.transfer import Frozen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a resumed run needs besides the data iterator.

    params: fp32 masters (NNX state of the drafter's nnx.Param); averaged: their mean over updates (optimizer.ema_decay), None where
    that is off; frozen: stored arrays that are not trained; step counts batches, updates counts applied updates (a skipped step is
    no update); skipped, consecutive_skips count non-finite steps; rng is the base key's data, folded by step.
    """

    params: nnx.State
    averaged: nnx.State | None
    frozen: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    updates: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array
    rng: jax.Array

    @property
    def exported(self) -> nnx.State:
        """The weights that the run hands on."""
        return self.params if self.averaged is None else self.averaged


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up over ``warmup_fraction`` of the steps, cosine to ``final_fraction`` of the peak."""
    warmup = int(round(config.warmup_fraction * steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1) if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.final_fraction * config.learning_rate,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW with fp32 moments."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps), b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mu_dtype=jnp.float32
        ),
    )


def purpose_key(key: jax.Array, purpose: str) -> jax.Array:
    """A key for one named use, so adding a use never shifts the others."""
    return jax.random.fold_in(key, zlib.crc32(purpose.encode()) & 0x7FFFFFFF)


def build_drafter(config: TrainConfig, key: jax.Array) -> Drafter:
    """A freshly initialised drafter with fp32 parameters (``config.drafter`` resolved)."""
    return Drafter(config.drafter, rngs=nnx.Rngs(params=key), remat=config.remat, kernels=config.kernels)


def abstract_state(config: TrainConfig) -> tuple[nnx.GraphDef, TrainState]:
    """Graph definition and the state as shapes and dtypes, allocating nothing."""
    model = nnx.eval_shape(lambda: build_drafter(config, jax.random.key(0)))
    graphdef = nnx.split(model, nnx.Param, Frozen)[0]
    return graphdef, jax.eval_shape(lambda: _initial_state(config))


def _initial_state(config: TrainConfig) -> TrainState:
    key = jax.random.key(config.seed)
    _, params, frozen = nnx.split(build_drafter(config, purpose_key(key, "init")), nnx.Param, Frozen)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        params=params,
        averaged=jax.tree.map(jnp.copy, params) if config.optimizer.ema_decay else None,
        frozen=frozen,
        opt_state=make_optimizer(config.optimizer, config.steps).init(params),
        step=zero,
        updates=zero,
        skipped=zero,
        consecutive_skips=zero,
        rng=jax.random.key_data(key),
    )


def initial_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Initial state, born in its planned layout: equal values on every mesh."""
    shardings = tree_shardings(abstract_state(config)[1], mesh)
    return jax.jit(lambda: _initial_state(config), out_shardings=shardings)()


def average_weights(averaged: nnx.State, params: nnx.State, updates: jax.Array, decay: float) -> nnx.State:
    """The mean of the weights after updates 1..n, where update i weighs decay^(n - i); ``averaged`` is that of n - 1 updates, ``params`` those after n.

    Kept as a mean, not as a sum that starts from 0: the random start has no share in it, however short the run.
    """
    share = (1.0 - decay) / -jnp.expm1(updates.astype(jnp.float32) * math.log(decay))  # (1 - d) / (1 - d^n)
    share = jnp.where(updates == 1, 1.0, share)  # without rounding
    return jax.tree.map(lambda mean, new: (1.0 - share) * mean + share * new, averaged, params)


def step_anchors(rng: jax.Array, step: jax.Array, loss_mask_BS: jax.Array, config: TrainConfig) -> tuple[jax.Array, jax.Array]:
    """The anchors of one step, a function of the base key and the step alone: resume needs no more."""
    key = jax.random.fold_in(purpose_key(jax.random.wrap_key_data(rng), "anchors"), step)
    return draw_anchors(key, loss_mask_BS, config.anchors.num_anchors, replacement=config.anchors.replacement)


def make_train_step(
    config: TrainConfig, mesh: Mesh, drafter_graph: nnx.GraphDef, target: Target, objective: Callable = block_objective
) -> Callable[[TrainState, nnx.State, dict[str, jax.Array]], tuple[TrainState, dict]]:
    """Jitted ``(state, target_state, batch) -> (state, metrics)``; the state is donated.

    ``objective`` is called as ``block_objective``. batch: tokens [B,S] int32, loss_mask [B,S] bool. metrics: (sum, weight) pairs plus learning rate,
    gradient norm and skip counters. A non-finite loss or gradient leaves parameters, moments and
    the update count bit for bit as they were, only counts the skip, and gives its metrics weight 0.
    """
    target_graph, abstract_target = nnx.split(target)
    _, abstract = abstract_state(config)
    shardings = tree_shardings(abstract, mesh)
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    dtype = jnp.dtype(config.compute_dtype)
    drafter_config = config.drafter

    def train_step(state: TrainState, target_state: nnx.State, batch: dict[str, jax.Array]):
        frozen_target = nnx.merge(target_graph, target_state)
        tokens_BS, loss_mask_BS = batch["tokens"], batch["loss_mask"]
        anchors_BN, keep_BN = step_anchors(state.rng, state.step, loss_mask_BS, config)
        blocks = make_blocks(
            tokens_BS,
            loss_mask_BS,
            anchors_BN,
            keep_BN,
            block_size=drafter_config.block_size,
            mask_token_id=drafter_config.mask_token_id,
            num_predicting_slots=drafter_config.num_predicting_slots,
            prefix_mask=config.loss.prefix_mask,
        )

        def loss_fn(params):
            drafter = nnx.merge(drafter_graph, params, state.frozen)
            progress = state.step.astype(jnp.float32) / config.steps
            return objective(drafter, frozen_target, tokens_BS, blocks, config.loss, dtype, progress=progress)

        (loss, metrics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
        averaged = None
        if state.averaged is not None:
            averaged = keep(average_weights(state.averaged, params, state.updates + 1, config.optimizer.ema_decay), state.averaged)
        new_state = TrainState(
            params=keep(params, state.params),
            averaged=averaged,
            frozen=state.frozen,
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + 1,
            updates=state.updates + finite,
            skipped=state.skipped + ~finite,
            consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
            rng=state.rng,
        )
        one = jnp.float32(1)
        metrics["optimizer/gradient_norm"] = (norm, one)
        # A skipped step has no say in averages: one inf would blank every curve of its log window.
        metrics = jax.tree.map(lambda x: jnp.where(finite, x, 0.0), metrics)
        metrics["optimizer/learning_rate"] = (schedule(state.updates).astype(jnp.float32), one)
        metrics["optimizer/skipped_steps"] = (new_state.skipped.astype(jnp.float32), one)
        metrics["optimizer/consecutive_skips"] = (new_state.consecutive_skips.astype(jnp.float32), one)
        return new_state, metrics

    return jax.jit(
        train_step,
        in_shardings=(shardings, tree_shardings(abstract_target, mesh), batch_sharding(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
        # XLA on a GPU would keep streams in fp32 between fusions where the model rounds them: twice the bytes for a precision nobody asked for.
        compiler_options={"xla_allow_excess_precision": False} if mesh.devices.flat[0].platform in ("gpu", "cuda") else None,
    )
