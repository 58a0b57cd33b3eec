"""Where the run's processes come from: this machine, or a Ray cluster."""
