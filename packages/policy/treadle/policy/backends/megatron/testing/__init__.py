"""What tests of the Megatron policy need: tiny models, sequences, and groups of rank processes."""
