"""Context parallelism: the rows of one micro-batch, spread over the ranks of a context group.

Each rank computes everything that belongs to a row (embedding, projections, norms, feed-forward
part, output layer) for its own rows only. Three things need other ranks:

- Attention: a row's keys and values may be on other ranks. They are gathered in each layer, used
  and dropped; the backward pass gathers them again, and sums their gradients over the ranks that
  used them (`attention.py`).
- The loss: a loss of whole samples needs all tokens of a sample, and a user's own loss may need
  anything. So the log-probabilities are gathered, and every rank computes the loss of the whole
  micro-batch, each the same. Backward, a rank takes the gradient of its own tokens and nothing
  else: each token's gradient goes through the model once, on the rank that computed the token
  (`loss_tokens.py`).
- Parameters: a rank's gradient is that of its rows. Megatron sums it over the data-parallel and
  context ranks together, which also share the optimizer's state.

`rows.py` assigns rows to ranks. Micro-batches with shared prefixes are spread in the same way.
"""
