"""What a run is told: the tree, its loading, and verl's names for it."""
