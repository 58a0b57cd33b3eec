"""The policy backend on Megatron-core. The only package that imports `megatron`."""
