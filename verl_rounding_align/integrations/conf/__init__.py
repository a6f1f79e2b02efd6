"""Hydra overlays: `+rounding_align=rope` sets the key for actor and ref; a package, so that `pkg://` finds it."""
