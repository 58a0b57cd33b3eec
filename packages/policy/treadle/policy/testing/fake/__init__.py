"""A small policy in numpy, for tests of everything around a policy; see `backend`."""
