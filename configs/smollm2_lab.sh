#!/usr/bin/env bash
# The lab comparison of README.md: DFlash and DSpine on SmolLM2-135M-Instruct at an equal budget, scored right after training.
# usage: bash configs/smollm2_lab.sh TARGET.gguf TRAIN_DATA DEV_DATA OUTPUT "SEEDS" [extra --set arguments for both methods]
# Needs one GPU of 24 GB or more; on an H200 a seed of both methods takes minutes. Run again to resume.
set -euo pipefail
target=$1 train=$2 dev=$3 out=$4 seeds=$5
shift 5
drafters=()
for seed in $seeds; do
  for method in dflash dspine; do
    python3 -m train.main "configs/smollm2_135m_$method.py" --set target="$target" --set data.path="$train" \
      --set workdir="$out/$method-seed$seed" --set seed="$seed" "$@"
    drafters+=(--drafter "$method=$out/$method-seed$seed/drafter")
  done
  python3 -m serve.evaluate --target "$target" --data "$dev" --output "$out/eval" --batch-size 16 "${drafters[@]}"
done
