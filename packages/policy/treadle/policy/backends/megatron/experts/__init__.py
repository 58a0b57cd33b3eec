"""Mixtures of experts: feed-forward parts of which each token goes through a few.

- `shape`: their sizes and variants from a Hugging Face config, and what cannot be built.
- `layer`: a decoder layer with experts, in Megatron's terms.
- `router`: which experts a token goes to, and the loss that balances them.
- `routing`: the rows of a micro-batch for the routers, with choices to replay.
- `plan`: what micro-batches need where ranks share experts.
- `load`: how evenly tokens went to experts, as metrics.
"""
