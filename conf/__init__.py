"""Hydra group ``equipoise``: presets only; defaults live in :class:`equipoise.config.EquipoiseConfig`."""
