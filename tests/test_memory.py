"""What compiled decoding programs need of memory."""

import jax
import jax.numpy as jnp
import tiny

from dspine_jax import speculative
from dspine_jax.sampling import SamplingConfig
from dspine_jax.speculative import Decoder, DecodeSettings


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
