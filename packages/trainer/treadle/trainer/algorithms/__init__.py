"""What is learned: pure functions of numbers and tensors, without I/O, state or communication.

- `advantages`: the rewards of a group to the advantage of each trajectory.
- `losses`: a micro-batch's log-probabilities to the loss of each token.
- `kl`: estimators of the KL penalty that a loss may add.
- `mismatch`: metrics of the gap between the trainer's probabilities and the engine's.

To add a loss, write a class with the protocol `treadle.trainer.policy.backend.LossFn` in `losses`,
declare its settings in `config/algorithm.py` and choose it in `losses.policy_loss`. A loss returns
one value per token and reduces nothing. An advantage estimator, an importance correction or a group
filter goes here too, as a function of its inputs; `training_loop` decides when to call it. Golden
values are in `tests/golden`.
"""
