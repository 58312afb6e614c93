"""Rollouts that finish together: which requests move where, how long a step takes, how long a request still runs."""
