"""What moving requests between ranks saves in a rollout: a simulation, step by step, of ranks that decode together."""
