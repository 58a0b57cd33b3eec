"""The configuration of a run: the tree, its loading, and verl's names for it."""
