"""LoRA: `linears` adapts Megatron's linear layers, `adapter` starts, collects and writes it."""
