"""Which requests move where, what that saves, and which lengths to expect. Numpy only."""
