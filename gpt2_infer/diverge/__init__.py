"""Where the texts of two backends or engines diverge, and whether rounding or a bug is why."""
