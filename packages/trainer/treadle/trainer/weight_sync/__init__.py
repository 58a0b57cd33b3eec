"""Moving one weight version from the policy's ranks to the rollout servers."""
