"""The calculator demo: its model, its data, and the scripts that made them."""
