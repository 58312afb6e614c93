"""An application of any kind, for Hydra to compose."""
