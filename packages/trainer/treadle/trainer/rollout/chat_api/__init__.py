"""A model behind an OpenAI-compatible address, sampled with the loops and tools of training.

Such an address takes messages and returns messages. Loops take ids and return ids, so the renderer
here writes messages as ids from which the generator reads the same messages.
"""
