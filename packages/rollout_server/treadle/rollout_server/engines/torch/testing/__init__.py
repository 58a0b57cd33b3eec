"""Test helpers of the torch engine: tiny models, reference answers of transformers, engines."""
