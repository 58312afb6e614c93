"""Which requests move where, what that is worth, and what lengths to expect. Numpy only."""
