"""Where two texts part, by backends or by engines, and whether rounding or a bug parts them."""
