"""Models and rows of the demos, made by `examples/warm_start`. A default run reads `calculator`."""
