"""Algorithms: pure functions of numbers and tensors, without I/O, state or communication.

- `advantages`: the outcomes of a step to the advantage of each trajectory; `estimators` finds them
  by name, `gae` is for a policy with a critic, whose loss is in `value_loss`.
- `losses`: a micro-batch's log-probabilities to the loss of each token.
- `choose_loss`: the loss that the settings describe, with KL penalty and entropy bonus.
- `token_selection`: the tokens that Clip-Cov and KL-Cov treat apart.
- `correction`: weights of tokens whose probability was another when they were sampled.
- `kl`: estimators of the KL penalty.
- `mismatch`: metrics of the gap between the trainer's probabilities and the engine's.

To add a loss, write a class with the protocol `treadle.policy.backend.LossFn` in `losses`,
declare its name and settings in `config/algorithm.py` and add it to `choose_loss.BUILT_IN`. A loss
returns one value per token and reduces nothing. An advantage estimator is a function in
`advantages` and an entry of `estimators.NAMED`. Golden values are in `tests/golden`.
"""
