"""Everything that measures: timing, results and what is made of them."""
