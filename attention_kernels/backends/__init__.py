"""One small module per family of backends; importing one registers it and does nothing else."""
