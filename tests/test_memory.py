"""What compiled decoding programs need of memory, against what is reckoned; the batch size where nobody names one."""

import types

import jax
import jax.numpy as jnp
import pytest
import tiny
from flax import nnx

from dspine_jax import memory, speculative
from dspine_jax.drafter import Drafter
from dspine_jax.sampling import SamplingConfig
from dspine_jax.speculative import Decoder, DecodeSettings


@pytest.mark.parametrize(
    ("method", "sampling", "policy"),
    [
        (None, SamplingConfig(0.0), "own"),
        (None, SamplingConfig(0.7, 20, 0.95), "own"),
        ("dflash", SamplingConfig(1.0, 0, 0.95), "own"),
        ("dspine", SamplingConfig(1.0, 0, 0.95), "tail_mixed"),
    ],
)
def test_a_row_needs_no_more_than_is_reckoned(method, sampling, policy):
    """Caches and temporaries of the compiled loop, by row: never above the estimate, and above a sixth of it."""
    target = tiny.tiny_target(num_layers=2, vocab_size=4096, num_tokens=4096)
    drafter, drafts = None, 0
    if method:
        config = tiny.train_config(method, drafter={"block_size": 4, "num_layers": 1, "target_layer_ids": (0,)}).drafter.resolve(target.config)
        drafter, drafts = Drafter(config, rngs=nnx.Rngs(0)), 3
    decoder = Decoder(target, drafter, DecodeSettings(drafts, sampling, policy))
    state = jax.eval_shape(lambda: speculative.idle(drafter, target, 64, 128, 64, decoder.settings))
    program = speculative._run_rounds.lower(decoder._drafter_state, decoder._target_state, state, jax.ShapeDtypeStruct((), jnp.int32), **decoder._static)
    analysis = program.compile().memory_analysis()
    row = memory.row_bytes(target.config, drafter and drafter.config, drafts, 128, "float32")
    assert row / 6 < (analysis.temp_size_in_bytes + analysis.alias_size_in_bytes) / 64 <= row


def test_a_refill_and_a_call_need_less_memory_than_one_cache():
    """Rows are put into the caller's buffers, a call reads a part of the cache: no copy of it is among the temporaries."""
    target = tiny.tiny_target(num_layers=6)
    decoder = Decoder(target, None, DecodeSettings(0, SamplingConfig(0.7, 0, 0.95)))
    shape, batch, n = jax.ShapeDtypeStruct, 64, 2
    state = jax.eval_shape(lambda: speculative.idle(None, target, batch, 1024, 64, decoder.settings))
    keys, ints = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), n)), shape((n,), jnp.int32)
    cache = sum(x.size * x.dtype.itemsize for x in (*state.target_cache.keys, *state.target_cache.values))
    run = speculative._run_rounds.lower(None, decoder._target_state, state, shape((), jnp.int32), width=256, **decoder._static)
    refill = speculative._refill.lower(None, decoder._target_state, state, ints, shape((n, 64), jnp.int32), ints, ints, keys, **decoder._static)
    for lowered in (run, refill):
        memory = lowered.compile().memory_analysis()
        assert memory.temp_size_in_bytes < cache / 3 and cache <= memory.alias_size_in_bytes


def test_the_batch_size_where_nobody_says(monkeypatch):
    """A power of two that fits what is free; 1 where nothing fits, 1024 at most; 32 on a CPU and where the device does not tell."""
    assert memory.default_batch_size(10**9) == memory.ROWS_WITHOUT_COUNT == 32
    stats = {"bytes_limit": 10_000, "bytes_in_use": 1_000}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(memory_stats=lambda: stats)])
    assert [memory.default_batch_size(row) for row in (7, 15, 100, 112, 10_000)] == [1024, 256, 64, 64, 1]
    assert [memory.default_batch_size(100, yet_to_load=size) for size in (5_000, 8_999, 10_000)] == [32, 1, 1]
    stats = {"largest_alloc_size": 3}
    assert memory.default_batch_size(100) == 32
