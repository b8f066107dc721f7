"""Heads: one result per step (`Softmax`, `Sigmoid`, `Forecast`, `DistributionForecast`) or one per sequence (`PooledSoftmax`,
`PooledSigmoid`, `PooledNumbers`); a `CRF` chooses the results of all steps of a sequence together, `Ctc` fewer than there are steps.

Every head has `forward(y) -> out`, `score(out, target, weights=None) -> (loss sum, count)`, and `loss(y, target, weights=None)`, which does
both. Losses are sums, not means: replicas, chunks and micro-batches hold different numbers of targets, and the division happens once. A
missing target (-100 among integers, a non-finite number among floats) adds nothing to the sum, the count or the gradient. Losses are in
float32 or wider. `weights`: one for each target, without those of its last dimensions in which weights do not differ; each target's loss is
multiplied by its weight, and the count is the sum of the weights of targets that are present. A target of weight 0 is missing.

A pooled head reads sequences that may arrive in several time chunks: `start` makes an accumulator, `pool` adds each chunk's outputs
to it, and forward and loss read it once, at the end. A head with `reads_whole = True` reads sequences that are never cut,
and their lengths: `forward(y, lengths)`, `loss(y, target, lengths)`.

Shapes in this folder: T time, B lane, W width of the last layer, V classes, K steps ahead, C columns, Q quantiles.
"""
