#!/usr/bin/env bash
# Makes everything in assets/demo from stored answers: tokenizer, target, the target's own answers, drafters.
# usage: bash configs/demo/make.sh TRAIN.npz TOKENIZER_FOLDER WORK [pretraining steps] [drafter steps]
# TOKENIZER_FOLDER holds the tokenizer of the stored answers. One GPU: minutes. Run again to go on where it stopped.
set -euo pipefail
npz=$1 tokenizer=$2 work=$3 pretrain_steps=${4:-3500} drafter_steps=${5:-6000}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
mkdir -p "$work"
python() { "${PYTHON:-python3}" "$@"; }

[ -f "$work/text.jsonl" ] || python configs/demo/corpus.py "$npz" --tokenizer "$tokenizer" --output "$work"
[ -f "$work/tokenizer/tokenizer.json" ] || python configs/demo/tokenizer.py "$work/text.jsonl" --output "$work/tokenizer"
# The text as rows of ids: a folder with config.json and the tokenizer is all that --keep-answers needs of a target.
[ -f "$work/shape/config.json" ] || python -m train.pretrain --tokenizer "$work/tokenizer" --output "$work/shape" --config-only
for name in text held_out; do
  [ -f "$work/$name/manifest.json" ] || python -m train.prepare "$work/$name.jsonl" --target "$work/shape" --output "$work/$name" --keep-answers
done
[ -f "$work/target/model.safetensors" ] || python -m train.pretrain --data "$work/text" --held-out "$work/held_out" \
  --tokenizer "$work/tokenizer" --output "$work/target" --steps "$pretrain_steps"
# What the drafters learn: the target's own answers. What they are scored on: its greedy answers to held-out prompts.
[ -f "$work/train/manifest.json" ] || python -m train.prepare "$work/prompts.jsonl" --target "$work/target" --output "$work/train" \
  --max-length 384 --max-new-tokens 192 --batch-size 256 --temperature "${TEMPERATURE:-0.7}" --top-p 1
[ -f "$work/evaluation/manifest.json" ] || python -m train.prepare "$work/evaluation.jsonl" --limit 64 --target "$work/target" \
  --output "$work/evaluation" --max-length 384 --max-new-tokens 128 --temperature 0 --top-p 1 --dtype float32
for method in dflash dspine; do
  [ -f "$work/$method/drafter/model.safetensors" ] || python -m train.main "configs/demo/$method.py" --set target="$work/target" \
    --set data.path="$work/train" --set workdir="$work/$method" --set steps="$drafter_steps" --set data.batch_size=32 \
    --set anchors.num_anchors=48 --set data.max_length=384 --set compute_dtype=bfloat16 --set log.every=50
done
python configs/demo/pack.py "$work" "$work/demo"
python -m serve.evaluate --target "$work/target" --data "$work/evaluation" --output "$work/eval" --dtype float32 --batch-size 32 \
  --drafter dflash="$work/dflash/drafter" --drafter dspine="$work/dspine/drafter"
