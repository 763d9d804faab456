"""The training step in PyTorch, to measure ours against (train/compare_torch.py); the only part of the package that needs torch.

The model is z-lab's ``dflash==0.1.0`` (under its tensor names, so its checkpoints load) with DSpine's injections, the objective is
``dspine_jax/objective.py``, the anchors are ``dspine_jax/anchors.py``; tests/test_torch_step.py holds loss, every gradient and the update to ours. How it is
made fast:

* The target and the drafter's blocks are one ``torch.compile``d graph each, with fixed shapes and no graph break; nothing in a step waits for the device.
* The target is frozen: bf16 weights, q/k/v and gate/up merged into one product each, no autograd, nothing after the last tapped layer, and the faster of
  PyTorch's fused causal attentions (timed beforehand at its shape).
* Blocks attend through ``flex_attention`` over [context | all block slots], grouped heads inside the kernel. The block mask is built from the step's
  anchors inside the same graph. Anchors are sorted, so that the queries of a tile see about the same context and most of a row's tiles are skipped.
* fp32 masters: the graph joins the weights of projections that read the same input, casts them to bf16 on the way, and runs one product: q/k/v, gate/up,
  both products of an injection's normed stream, both of its feature, and the context's keys and values of all draft layers together.
* T of the tokens is computed once for a row and gathered at labels, predecessors and anchors.
* The vocabulary's cross-entropy runs in chunks. The head is frozen, so the forward pass of a chunk already forms the gradient of its hidden states, while
  its logits exist. Logits are bf16 under an fp32 softmax, as in PyTorch's fused losses (ours are fp32). Metrics beside the loss (accuracy, simulated tau),
  which our step computes, are left out.
* Fused AdamW, which also clips and skips non-finite steps in its one pass over the gradients.
* Tried with and without a CUDA graph of the whole step, and with several chunk sizes; the fastest form counts.
"""
