"""What a machine with one GPU can tell: `python -m benchmarks.gpu --part 1`, then 2 and 3.

Part 1 checks numbers against float64 and times products and whole updates, part 2 varies what the
library leaves open and looks into an update and a training step, part 3 trains with Muon and Muon+.
Each ends within its budget of nine minutes: a step that no longer fits is left out, which the
record says. The record is written after each step.

It needs `jax[cuda13]`, optax, flax, orbax-checkpoint, tokenizers and rich, and neither tyro nor
matplotlib. The parts share a cache of compiled programs: `.cache/jax`, or what the environment
names. Part 1 tokenizes the text of part 3, sources of installed packages, in the background.
`--toy` shows on any machine that all steps run.
"""
