"""The policy on transformers' own modules, sharded by torch's FSDP2.

- `backend`: log-probabilities, updates, references, weights and checkpoints; `critic` beside it.
- `trained`: what both have in common; `lora`: adapters by PEFT.
- `net`: the model behind one call, which gives log-probabilities of loss tokens.
- `sharding`: which rank has what of it; `experts` that ranks share; `context`: positions they do.
- `attention`: packed sequences that see only themselves.
- `batches`: how sequences become the input of one forward pass.
- `description`: which models and settings, without torch.
"""
