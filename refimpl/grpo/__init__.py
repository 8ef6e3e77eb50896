"""Asynchronous GRPO: the arithmetic of learning from rollouts that nobody had to wait for.

Cores, in reading order: `advantage` (who did better than the group), `loss` (the two-sided clip), `logprob` (the
policy's log-probabilities, cheaply), `packing` (many samples in one row), `staleness` (how old data may be),
`rewards` (length targets and difficulty), `rollout` (the file a worker hands in), `step` (all of it, as one
optimizer step).
"""
