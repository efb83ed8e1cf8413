"""Export of checkpoints to bundles, with PyTorch. Packages that run bundles do not import this package."""
