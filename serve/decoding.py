"""Real decoding in an evaluation: speed beside plain decoding, and the proof that the text is the same."""

from __future__ import annotations

import argparse
import time

import jax.numpy as jnp
import numpy as np

from dspine_jax.acceptance import acceptance_statistics
from dspine_jax.drafter import Drafter
from dspine_jax.generation import Generation, generate_batches
from dspine_jax.replay import Round, longest_repeat, loop_onset, make_drafting, replay_rows, replay_shape, walk_rounds
from dspine_jax.sampling import SamplingConfig
from dspine_jax.speculative import Decoder, DecodeSettings
from dspine_jax.target import Target
from dspine_jax.ties import BFLOAT16_GAP, parting_gaps
from serve.scoring import plain_rounds

MOST_LOOPING = 0.5  # share of tokens after the loop onset above which a speed says nothing of real text


def timed(decoder: Decoder, prompts: list[list[int]], evaluation) -> tuple[list[Generation], float]:
    """Answers and the seconds they took; compilation and one warm batch are not counted."""
    args, batch_size = evaluation.args, evaluation.decode_batch_size
    options = dict(max_new_tokens=args.max_new_tokens, max_length=decoder.target.config.max_position_embeddings, seed=args.seed)
    next(generate_batches(decoder, prompts, batch_size, **options))
    begin = time.perf_counter()
    answers = []
    for batch in generate_batches(decoder, prompts, batch_size, **options):
        answers += batch
        evaluation.progress.update(len(batch))
    return answers, time.perf_counter() - begin


def compare_decoding(evaluation, sampling: SamplingConfig) -> list[dict]:
    """Decode the first ``--decode`` prompts of an ``Evaluation``: an entry for plain decoding and one for each method, policy and draft length."""
    args, target = evaluation.args, evaluation.target
    prompts = [prompt for b in evaluation.benchmarks for prompt in b.prompts[: args.decode]]

    def decode(drafter: Drafter | None, weights: str, label: str, drafts: int, policy: str) -> dict:
        def make():
            evaluation.progress.set_description(f"T{sampling.temperature:g} decoding {label} {policy} {drafts}")
            settings = DecodeSettings(drafts, sampling, "own" if policy == "greedy" else policy, target.config.eos_token_ids, args.dtype)
            answers, seconds = timed(Decoder(target, drafter, settings), prompts, evaluation)
            return {"tokens": [a.tokens for a in answers], "rounds": plain_rounds([a.rounds for a in answers]), "seconds": seconds}

        inputs = (sampling, policy, weights, drafts, evaluation.decode_batch_size, prompts)
        return evaluation.part(f"T{sampling.temperature:g}-decode{evaluation.decode_batch_size}-{label}-{policy}-{drafts}", inputs, make, len(prompts))

    plain = decode(None, "", "plain", 0, "own")
    speed = lambda run: sum(map(len, run["tokens"])) / run["seconds"]  # noqa: E731
    plain_speed = speed(plain)  # 0 where no prompt leaves room for a token
    common = {"batch_size": evaluation.decode_batch_size, "prompts": len(prompts)}
    proof = {"state": "identical", "identical": len(prompts)} if sampling.greedy else {"state": "sampled", "identical": None}
    first = {"method": "plain", "policy": "-", "drafts": 0, "tau": None, "replay_tau": None, "speedup": 1.0}
    entries = [_flagged(first | common | proof, plain, plain_speed)]
    done = set()
    for label, _, drafter, weights in evaluation.drafters:
        if label in done:  # seeds of one method run equally fast
            continue
        done.add(label)
        for policy in evaluation.policies(drafter, sampling):
            for drafts in evaluation.decode_drafts:
                run = decode(drafter, weights, label, drafts, policy)
                rounds = [[Round(*r) for r in by_prompt] for by_prompt in run["rounds"]]
                entry = {"method": label, "policy": policy, "drafts": drafts, "tau": acceptance_statistics(rounds, drafts).get("tau_pooled")}
                entry |= common | proof | {"replay_tau": None, "speedup": speed(run) / plain_speed if plain_speed else None, "rounds": run["rounds"]}
                if sampling.greedy:
                    entry["replay_tau"] = _replay_tau(drafter, target, prompts, run["tokens"], drafts, args)
                    entry |= _proof(target, prompts, run["tokens"], plain["tokens"], args.dtype)
                entries.append(_flagged(entry, run, speed(run)))
    return entries


def _replay_tau(drafter: Drafter, target: Target, prompts: list[list[int]], answers: list[list[int]], drafts: int, args: argparse.Namespace) -> float | None:
    """Tau of a replay over what was decoded, with as many drafts a round: in fp32 it equals the decoded one to the last round."""
    drafting = make_drafting(drafter, target, dtype=jnp.dtype(args.dtype), anchors_per_chunk=args.anchors_per_chunk)
    shape = replay_shape(prompts, answers, batch_size=args.batch_size, anchors_per_chunk=args.anchors_per_chunk)
    judged = replay_rows(drafting, prompts, answers, **shape)
    rounds = [walk_rounds(np.array(answer), drafts_TJ[:, :drafts]) for answer, drafts_TJ in zip(answers, judged)]
    return acceptance_statistics(rounds, drafts).get("tau_pooled")


def _proof(target: Target, prompts: list[list[int]], ours: list[list[int]], plain: list[list[int]], dtype: str) -> dict:
    """How many texts equal plain decoding, and how near a tie the target was where the others part.

    state: 'identical'; 'near ties' when every difference starts within ``BFLOAT16_GAP`` in bfloat16; else 'differs'.
    """
    gaps = parting_gaps(target, prompts, ours, plain, dtype=dtype)
    answer = {"identical": len(prompts) - len(gaps), "state": "identical"}
    if gaps:
        near = dtype == "bfloat16" and max(gaps) <= BFLOAT16_GAP
        answer |= {"state": "near ties" if near else "differs", "gaps": [gap if np.isfinite(gap) else None for gap in gaps]}
    return answer


def _flagged(entry: dict, run: dict, tokens_per_s: float) -> dict:
    """Add speed, repetition and, where the speed would say nothing, why it is withheld."""
    tokens = [np.array(row) for row in run["tokens"]]
    looped = sum(len(row) - loop_onset(row) for row in tokens) / max(sum(map(len, tokens)), 1)
    entry |= {"tokens": sum(map(len, tokens)), "seconds": run["seconds"], "longest_repeat": max(map(longest_repeat, tokens), default=0)}
    entry |= {"looped_share": looped, "withheld": None}
    if entry["state"] == "differs":
        entry["withheld"] = "text differs from plain greedy decoding"
    elif looped > MOST_LOOPING:
        entry["withheld"] = f"{looped:.0%} of the tokens come after a loop onset"
    if entry["withheld"]:
        return entry | {"tokens_per_s": None, "speedup": None, "seconds": None}
    return entry | {"tokens_per_s": tokens_per_s}
